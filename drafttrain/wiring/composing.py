"""Compose a configuration of a file, its choices and the command line, refusing every name that it
does not have.

A wrong setting gets one clear line: what was given, the nearest valid name, the choices.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafttrain.checks import literal_text, pasted, path_of, word_of
from drafttrain.errors import InputError, first_line
from drafttrain.runs import Invocation
from drafttrain.wiring.conf import comments_of, conf_dir
from drafttrain.wiring.names import dotted_keys, has_key, join, nearest, unknown_choice, unknown_key
from drafttrain.wiring.outside import check_template

_Options = Callable[[str], list[str]]
"""The choices of a group."""
_PATHS = (
    *("path", "run_dir", "resume", "out", "init_from", "package", "head", "check", "against"),
)
"""Last parts of the names of settings that are paths."""
_LISTS_OF_PATHS = ("runs", "prompts")
"""Paths where a door takes them as text."""
_State = tuple[tuple[str, int, int], ...]


def compose(
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    text: Sequence[str] = ("prompt",),
    config_dir: str | os.PathLike[str] | None = None,
    check_missing: bool = True,
) -> DictConfig:
    """Compose `conf/<config_name>.yaml` with overrides, refusing every name that the configuration
    does not have.

    Args:
        config_name: the door's name.
        overrides: `key=value` words as on the command line.
        text: keys whose value is taken literally, so that a sentence needs no quoting beyond the
            shell's.
        config_dir: a further folder of configurations (one's own experiments), searched after the
            shipped one.
        check_missing: refuse if a setting without a default (`???`) is still without a value.
    Raises: InputError.
    """
    return invocation_of(
        config_name, overrides, text=text, config_dir=config_dir, check_missing=check_missing
    ).config


def invocation_of(
    door_name: str,
    overrides: Sequence[str],
    *,
    text: Sequence[str] = ("prompt",),
    config_dir: str | os.PathLike[str] | None = None,
    check_missing: bool = True,
) -> Invocation:
    """As `compose`, with what was asked and chosen next to the configuration."""
    search = search_path(config_dir)
    state = None if search else _state_of(conf_dir())
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=door_name):
        options_of = functools.cache(lambda group: group_options(group, search))
        base, plain_choices = _load(door_name, search, state)
        choices = plain_choices
        written, parsed = _read(overrides, text, choices, options_of)
        groups = [o for o in parsed if _is_group(o, options_of, choices)]
        values = [o for o in parsed if o not in groups]
        for override in groups:
            _check_group(override, choices, base, door_name, options_of)
        chosen, choices = _load(
            door_name, [*search, *(_line(o, group=True) for o in groups)], state
        )
        _check_experiment(door_name, search, state, chosen, choices, plain_choices)
        settings = OmegaConf.to_container(chosen)
        for override in values:
            _check_key(override, chosen, settings, choices)
        config = _with_values(chosen, values, options_of)
        if config is None:
            lines = [_line(o, group=o in groups) for o in parsed]
            lines = [
                # Keys were checked: one that is not there is put into an open section.
                f"++{line}" if o in values and _is_nested(o) else line
                for o, line in zip(parsed, lines, strict=True)
            ]
            config, choices = _load(door_name, [*search, *lines], None)
    _leave_unchosen(config, values, [group for group in plain_choices if not choices.get(group)])
    for key, value in written.items():
        OmegaConf.update(config, key, value, force_add=True)
    if check_missing:
        _check_complete(door_name, config, choices, overrides)
        check_template(config)
    return Invocation(door_name, tuple(overrides), copy.deepcopy(choices), config)


def _read(
    overrides: Sequence[str], text: Sequence[str], choices: Mapping[str, Any], options_of: _Options
) -> tuple[dict[str, str], list[Override]]:
    """Words of the command line, in their order, since of two for one setting the last counts.

    A key that is text and a choice too is a choice where its value names one.

    Returns: values of keys that are named as a group is, by key; everything else, parsed.
    Raises: InputError for a word that cannot be read, and for a setting of a choice whose place a
        text takes.
    """
    options = {key: options_of(key) for key in text}
    written: dict[str, str] = {}
    parsed: list[Override] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise InputError(f"cannot read {word!r}: settings are written key=value (see --help)")
        name = key.lstrip("+")
        picks = name in choices and value in options.get(name, ())
        override = _parse(word, () if picks else text)
        if options.get(name) and not picks:
            written[name] = str(override.value())
        else:
            written.pop(name, None)
            parsed.append(override)
    for override in parsed:
        key, *inside = re.split(r"[.\[]", override.key_or_group, maxsplit=1)
        if inside and key in written:
            raise InputError(
                f"{override.input_line}: {key}={written[key]} has no settings, leave one of them "
                "out"
            )
    return written, parsed


def _leave_unchosen(config: DictConfig, values: Sequence[Override], groups: Sequence[str]) -> None:
    """A section that nothing was chosen for stays empty, though an experiment writes into it: with
    joint=null its joint.* goes nowhere.

    Args:
        groups: that have no choice.
    Raises: InputError for a setting of such a section on the command line.
    """
    for group in groups:
        section: Any = config.get(group)
        if not OmegaConf.is_dict(section) or "_target_" in section:
            continue
        for override in values:
            if f"{override.key_or_group}.".startswith(f"{group}."):
                raise InputError(
                    f"{override.input_line}: {group}=null has no settings; give {group}=<choice>, "
                    "see --help"
                )
        config[group] = None


def _check_complete(
    door_name: str, config: DictConfig, choices: dict[str, Any], given: Sequence[str]
) -> None:
    """Raise InputError for settings without a value, and for references to nothing.

    Args:
        given: the words of the command, which the one that is shown repeats.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if not missing:
            OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " * bool(error.full_key)
        raise InputError(
            f"{where}the configuration does not resolve: {first_line(error)}"
        ) from error
    if missing:
        said = comments_of(door_name, choices)
        wanted = ", ".join(
            f"{key}=..." + (f" ({said[key]})" if key in said else "") for key in missing
        )
        raise InputError(
            f"needs {wanted}: python -m drafttrain.{door_name} "
            + " ".join([*map(shlex.quote, given), *(f"{key}=..." for key in missing)])
        )


def search_path(config_dir: str | os.PathLike[str] | None) -> list[str]:
    """Words by which Hydra finds a further folder of configurations; none without one. Raises
    InputError if it is no folder."""
    if config_dir is None:
        return []
    folder = path_of("--config-dir", config_dir)
    if not folder.is_dir():
        raise InputError(f"--config-dir {config_dir} is not a directory")
    return [f"hydra.searchpath={word_of([f'file://{folder.resolve()}'])}"]


def _parse(word: str, text: Sequence[str]) -> Override:
    """One word; of a text or a path the value is what was written, whatever letters it has."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    is_path = bool(equals) and _is_path(name, text)
    if is_path or name not in text:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"cannot read {word!r}: it is not UTF-8") from error
    held = _path_in(value) if is_path else None
    if held is None and name in text and equals:
        held = literal_text(value)
    try:
        override = OverridesParser.create().parse_override(
            word if held is None else f"{key}={QuotedString(held, Quote.double).with_quotes()}"
        )
    except (OverrideParseException, HydraException, ValueError) as error:
        raise InputError(
            f"cannot read {word!r}: {first_line(error)}. A value with spaces, brackets, "
            f"commas, quotes or colons needs quotes that reach this program: {pasted(key, value)}"
        ) from error
    if held is not None:
        override.input_line = word  # As it was written, for messages.
    if override.is_sweep_override():
        raise InputError(
            f"{word!r} names several values; one command makes one run. A list is written with "
            f"brackets, '{override.key_or_group}=[...]'; for a sweep, give fit -m too"
        )
    if override.key_or_group.split(".")[0] == "hydra":
        raise InputError(
            f"{word!r}: Hydra's own settings are not used here; the run's folder is "
            "run_dir=<folder>"
        )
    return override


def keys_named(overrides: Sequence[str]) -> list[str]:
    """The settings that words of a command give values to: of an object each part, so none of an
    empty one."""
    found: list[str] = []
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        given: Any = None
        if value.startswith("{"):
            with contextlib.suppress(OverrideParseException, HydraException, ValueError):
                given = OverridesParser.create().parse_override(word).value()
        found += _leaves(key, given)
    return found


def _leaves(key: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [key]
    return [leaf for name, held in value.items() for leaf in _leaves(f"{key}.{name}", held)]


def _is_path(key: str, text: Sequence[str]) -> bool:
    return key.rpartition(".")[2] in _PATHS or (key in _LISTS_OF_PATHS and key in text)


def _path_in(value: str) -> str | None:
    """A path as OmegaConf must hold it: as Hydra reads it, or else what was written, whatever
    letters it has. None for what is no text: null, a number, a list."""
    with contextlib.suppress(OverrideParseException, HydraException, ValueError):
        override = OverridesParser.create().parse_override(f"x={value}")
        if not override.is_sweep_override():
            found = override.value()
            return found if isinstance(found, str) else None
    return value


def _state_of(folder: Path) -> _State:
    """Name, time and size of every configuration in a folder: while they stay, so does what is
    composed of them."""
    files = [path for path in sorted(folder.rglob("*.yaml")) if path.is_file()]
    return tuple((str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in files)


def _load(
    door_name: str, lines: Sequence[str], state: _State | None
) -> tuple[DictConfig, dict[str, Any]]:
    """Hydra's own composition: the config without Hydra's node, and the choice made in each group.

    It reads some thirty files, one character at a time. With the state of the files it is kept for
    the next time the same is asked for, so nothing in it may be changed.
    """
    if state is None:
        return _composed.__wrapped__(door_name, tuple(lines), None)
    return _composed(door_name, tuple(lines), state)


@functools.lru_cache(maxsize=64)
def _composed(
    door_name: str, lines: tuple[str, ...], state: _State | None
) -> tuple[DictConfig, dict[str, Any]]:
    try:
        config = hydra_compose(door_name, overrides=list(lines), return_hydra_config=True)
    except MissingConfigException as error:
        if error.missing_cfg_file == door_name:
            raise InputError(
                f"there is no {door_name}.yaml in {conf_dir()}; it has {join(_stems(conf_dir()))}"
            ) from error
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = list(error.options or [])
        if options:
            raise InputError(unknown_choice(f"{group}={name}", group, name, options)) from error
        raise InputError(first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(first_line(error)) from error
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config, {str(k): v for k, v in choices.items() if not str(k).startswith("hydra/")}


def _with_values(
    config: DictConfig, values: Sequence[Override], options_of: _Options
) -> DictConfig | None:
    """A copy with values set as Hydra sets them. None where Hydra must do it: it adds and deletes,
    and words its refusals."""
    for override in values:
        key, value = override.key_or_group, override.value()
        is_group = "." not in key and not isinstance(value, dict) and bool(options_of(key))
        if override.type != OverrideType.CHANGE or override.package is not None or is_group:
            return None
    config = copy.deepcopy(config)
    try:
        for override in values:
            # Keys were checked: one that is not there is put into an open section.
            name, value = override.key_or_group, override.value()
            OmegaConf.update(config, name, value, merge=True, force_add=True)
    except OmegaConfBaseException:
        return None
    return config


def _is_nested(override: Override) -> bool:
    """Does it set a key within a section?"""
    return override.type == OverrideType.CHANGE and "." in override.key_or_group


def _line(override: Override, *, group: bool = False) -> str:
    """An override as Hydra reads it; no choice in a group (`group=null`) is what Hydra writes as a
    deletion."""
    assert override.input_line is not None
    key, value = override.get_key_element(), override._value
    if group and not override.is_delete() and override.value() is None:
        return f"~{key.lstrip('+')}"
    if isinstance(value, QuotedString):  # The word may be without the quotes.
        return f"{key}={value.with_quotes()}"
    return override.input_line


def group_options(group: str, search: Sequence[str]) -> list[str]:
    """The choices of a group, those of a further configuration folder included. Needs an
    initialised Hydra."""
    loader = GlobalHydra.instance().config_loader()
    name = group.partition("@")[0]
    return sorted(
        loader.get_group_options(name, results_filter=ObjectType.CONFIG, overrides=list(search))
    )


def _is_group(override: Override, options_of: _Options, choices: Mapping[str, Any]) -> bool:
    group = override.key_or_group
    if group in choices and not override.is_delete() and isinstance(override.value(), int | float):
        return True
    exists = bool(options_of(group)) if "." not in group else False
    return exists and (
        override.is_delete() or isinstance(override.value(), str | list) or override.value() is None
    )


def _check_group(
    override: Override,
    choices: dict[str, Any],
    base: DictConfig,
    door_name: str,
    options_of: _Options,
) -> None:
    group = override.key_or_group + (f"@{override.package}" if override.package else "")
    given = override.input_line
    if not override.is_add() and group not in choices:
        usable = sorted(choices)
        near = nearest(group, [*usable, *dotted_keys(base)])
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(
            f"{given}: {door_name} has no choice of {group}.{hint} Its choices are of: "
            f"{join(usable)}"
        )
    value = None if override.is_delete() else override.value()
    options = options_of(group)
    if value is None and choices.get(group) is not None:
        raise InputError(f"{given}: {door_name} needs one {group}, of {join(options)}")
    for name in value if isinstance(value, list) else [value]:
        if name is not None and str(name) not in options:
            raise InputError(unknown_choice(str(given), group, str(name), options))


def _check_key(
    override: Override, config: DictConfig, settings: Any, choices: dict[str, Any]
) -> None:
    if override.is_add() or override.is_force_add():
        # Whether a section takes it is for what the section builds to say; of sections there are no
        # more.
        if re.split(r"[.\[]", override.key_or_group)[0] not in config:
            raise InputError(
                unknown_key(str(override.input_line), override.key_or_group, config, choices)
            )
        return
    if not has_key(settings, override.key_or_group):
        raise InputError(
            unknown_key(str(override.input_line), override.key_or_group, config, choices)
        )
    key = override.key_or_group
    if key not in config:
        return
    if override.is_delete():
        raise InputError(f"{override.input_line}: {key} cannot be left out")
    if override.value() is None and any(choice.partition("@")[2] == key for choice in choices):
        return
    if OmegaConf.is_dict(config[key]) and not isinstance(override.value(), dict):
        inside = join(str(name) for name in config[key] if not str(name).startswith("_"))
        raise InputError(
            f"{override.input_line}: {key} holds several settings, give {key}.<setting>=... of "
            f"{inside}"
        )


def _check_experiment(
    door_name: str,
    search: Sequence[str],
    state: _State | None,
    config: DictConfig,
    choices: dict[str, Any],
    plain_choices: dict[str, Any],
) -> None:
    """An experiment overrides settings; a key that only the experiment has is a misspelling, found
    here and not after the run."""
    name = choices.get("experiment")
    if not name:
        return
    lines = [
        f"~{group}"
        if choice is None
        else f"{'' if group in plain_choices else '+'}{group}={_quote(choice)}"
        for group, choice in {**choices, "experiment": None}.items()
        if choice != plain_choices.get(group)
    ]
    plain, _ = _load(door_name, [*search, *lines], state)
    mine, theirs = (OmegaConf.to_container(one) for one in (config, plain))
    added = _added(cast("dict[Any, Any]", mine), cast("dict[Any, Any]", theirs))
    if added:
        raise InputError(unknown_key(f"experiment={name} sets {added[0]}", added[0], plain, {}))


def _added(config: dict[Any, Any], plain: dict[Any, Any], prefix: str = "") -> list[str]:
    """Keys of config that plain lacks. An empty mapping in plain is open: anything may be put in
    it. So is a table of things to build, by name, to another such thing."""
    if config.get("_target_") != plain.get("_target_") or (prefix and not plain):
        return []
    found: list[str] = []
    for key, value in config.items():
        if key not in plain:
            if prefix and _is_thing(value) and all(_is_thing(other) for other in plain.values()):
                continue
            found.append(f"{prefix}{key}")
        elif isinstance(value, dict) and isinstance(plain[key], dict):
            found += _added(value, plain[key], f"{prefix}{key}.")
    return found


def _is_thing(value: Any) -> bool:
    """What a table of things to build holds; None leaves one out."""
    return value is None or (isinstance(value, dict) and "_target_" in value)


def _quote(choice: Any) -> str:
    if isinstance(choice, list):
        return "[" + ",".join(map(str, choice)) + "]"
    return str(choice)


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))
