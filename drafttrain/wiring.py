"""Compose a configuration, build what it names, and open the doors.

Hydra is imported here and in the doors, nowhere deeper. The doors use Hydra's compose interface and not `@hydra.main`, so that
nothing changes the working directory, makes folders or configures logging, and so that a wrong setting gets one clear line:
what was given, the nearest valid name, the choices.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafttrain import runs
from drafttrain.errors import InputError, disk_full, first_line
from drafttrain.processes import rank, world_size
from drafttrain.runs import Invocation

CONF_DIR_VARIABLE = "DRAFTTRAIN_CONF_DIR"
TRACEBACK_VARIABLE = "DRAFTTRAIN_TRACEBACK"


def conf_dir() -> Path:
    """The folder of configurations: `drafttrain/conf` in an installed package, `conf/` beside the package in a checkout."""
    given = os.environ.get(CONF_DIR_VARIABLE)
    package = Path(__file__).resolve().parent
    candidates = [Path(given).resolve()] if given else [package / "conf", package.parent / "conf"]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise InputError(f"no configuration folder at {' or '.join(map(str, candidates))}: reinstall drafttrain")


# --- composing ---------------------------------------------------------------------------------------------------------


def compose(
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    text: Sequence[str] = ("prompt",),
    config_dir: str | os.PathLike[str] | None = None,
    check_missing: bool = True,
) -> DictConfig:
    """Compose `conf/<config_name>.yaml` with overrides, refusing every name that the configuration does not have.

    Args:
        config_name: the door's name.
        overrides: `key=value` words as on the command line.
        text: keys whose value is taken literally, so that a sentence needs no quoting beyond the shell's.
        config_dir: a further folder of configurations (one's own experiments), searched after the shipped one.
        check_missing: refuse if a setting without a default (`???`) is still without a value.
    Raises: InputError.
    """
    return _compose(config_name, overrides, text=text, config_dir=config_dir, check_missing=check_missing).config


def _compose(
    door_name: str,
    overrides: Sequence[str],
    *,
    text: Sequence[str] = ("prompt",),
    config_dir: str | os.PathLike[str] | None = None,
    check_missing: bool = True,
) -> Invocation:
    search = _search(config_dir)
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=door_name):
        base, choices = _load(door_name, search)
        # A key that is text and a choice too is a choice where its value names one.
        options = {key: _options(key, search) for key in text if key in choices}
        picked = [word for word in overrides if word.partition("=")[2] in options.get(word.partition("=")[0], ())]
        literal, parsed = _parse([word for word in overrides if word not in picked], text)
        parsed += _parse(picked, ())[1]
        groups = [o for o in parsed if _is_group(o, search)]
        values = [o for o in parsed if o not in groups]
        for override in groups:
            _check_group(override, choices, base, door_name, search)
        chosen, choices = _load(door_name, [*search, *(_line(o, group=True) for o in groups)])
        _check_experiment(door_name, search, chosen, choices)
        for override in values:
            _check_key(override, chosen, choices)
        config, choices = _load(door_name, [*search, *(_line(o, group=o in groups) for o in parsed)])
    for key, value in literal.items():
        if not _has(config, key):
            raise InputError(_unknown_key(f"{key}={value}", key, config, choices))
        OmegaConf.update(config, key, _escape(value))
    if check_missing:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            said = _all_comments(door_name, choices)
            wanted = ", ".join(f"{key}=..." + (f" ({said[key]})" if key in said else "") for key in missing)
            raise InputError(f"needs {wanted}: python -m drafttrain.{door_name} {' '.join(f'{k}=...' for k in missing)}")
        try:
            OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            raise InputError(f"the configuration does not resolve: {first_line(error)}") from error
    return Invocation(door_name, tuple(overrides), choices, config)


def _search(config_dir: str | os.PathLike[str] | None) -> list[str]:
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise InputError(f"--config-dir {config_dir} is not a directory")
    return [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]


def _parse(overrides: Sequence[str], text: Sequence[str]) -> tuple[dict[str, str], list[Override]]:
    literal: dict[str, str] = {}
    words: list[str] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise InputError(f"cannot read {word!r}: settings are written key=value, e.g. experiment=quickstart (see --help)")
        if key in text:
            literal[key] = value
        else:
            words.append(word)
    parsed = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except (OverrideParseException, HydraException) as error:
            key, _, value = word.partition("=")
            raise InputError(
                f"cannot read {word!r}: {first_line(error)}. A value with spaces, brackets, commas, quotes or colons needs "
                f"quotes that reach this program: '{key}=\"{value}\"'"
            ) from error
        if override.is_sweep_override():
            raise InputError(
                f"{word!r} names several values; one command makes one run. A list is written with brackets, "
                f"'{override.key_or_group}=[...]'; for a sweep, loop in the shell"
            )
        if override.key_or_group.split(".")[0] == "hydra":
            raise InputError(f"{word!r}: Hydra's own settings are not used here; the run's folder is run_dir=<folder>")
        parsed.append(override)
    return literal, parsed


def _load(door_name: str, lines: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Hydra's own composition. Returns the config without Hydra's node, and the choice made in each group."""
    try:
        config = hydra_compose(door_name, overrides=list(lines), return_hydra_config=True)
    except MissingConfigException as error:
        if error.missing_cfg_file == door_name:
            raise InputError(f"there is no {door_name}.yaml in {conf_dir()}; it has {_join(_stems(conf_dir()))}") from error
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = list(error.options or [])
        if options:
            raise InputError(_unknown_choice(f"{group}={name}", group, name, options)) from error
        raise InputError(first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(first_line(error)) from error
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config, {str(k): v for k, v in choices.items() if not str(k).startswith("hydra/")}


def _comments(path: Path, prefix: str = "") -> dict[str, str]:
    """{dotted key: the comment above it or beside it} of a configuration file: what a setting means is written once, there."""
    found: dict[str, str] = {}
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        text = line.strip()
        match = re.match(r"^( *)([\w-]+):(?:\s[^#]*?)?(?:\s#\s*(.*))?$", line)
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        if match:
            indent, key, beside = len(match.group(1)), match.group(2), match.group(3)
            parents = [(depth, name) for depth, name in parents if depth < indent]
            said = " ".join([*above, *([beside.strip()] if beside else [])])
            if said and key != "defaults":
                found[".".join([*filter(None, [prefix]), *(name for _, name in parents), key])] = said
            parents.append((indent, key))
        above = []
    return found


def _all_comments(door_name: str, choices: dict[str, Any]) -> dict[str, str]:
    found = _comments(conf_dir() / f"{door_name}.yaml")
    for group, chosen in choices.items():
        folder, _, package = group.partition("@")
        for name in chosen if isinstance(chosen, list) else [chosen]:
            if name is not None and folder != "experiment":
                found = {**_comments(conf_dir() / folder / f"{name}.yaml", package or folder.replace("/", ".")), **found}
    return found


def _line(override: Override, *, group: bool = False) -> str:
    """An override as Hydra reads it; no choice in a group (`group=null`) is what Hydra writes as a deletion."""
    assert override.input_line is not None
    if group and not override.is_delete() and override.value() is None:
        return f"~{override.get_key_element().lstrip('+')}"
    return override.input_line


def _options(group: str, search: Sequence[str]) -> list[str]:
    """The choices of a group, those of a further configuration folder included. Needs an initialised Hydra."""
    loader = GlobalHydra.instance().config_loader()
    name = group.partition("@")[0]
    return sorted(loader.get_group_options(name, results_filter=ObjectType.CONFIG, overrides=list(search)))


def _is_group(override: Override, search: Sequence[str]) -> bool:
    group = override.key_or_group
    exists = bool(_options(group, search)) if "." not in group else False
    return exists and (override.is_delete() or isinstance(override.value(), str | list) or override.value() is None)


def _check_group(
    override: Override, choices: dict[str, Any], base: DictConfig, door_name: str, search: Sequence[str]
) -> None:
    group = override.key_or_group + (f"@{override.package}" if override.package else "")
    given = override.input_line
    if not override.is_add() and group not in choices:
        usable = sorted(choices)
        near = nearest(group, [*usable, *dotted_keys(base)])
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"{given}: {door_name} has no choice of {group}.{hint} Its choices are of: {_join(usable)}")
    value = None if override.is_delete() else override.value()
    options = _options(group, search)
    for name in value if isinstance(value, list) else [value]:
        if name is not None and str(name) not in options:
            raise InputError(_unknown_choice(str(given), group, str(name), options))


def _check_key(override: Override, config: DictConfig, choices: dict[str, Any]) -> None:
    if override.is_add() or override.is_force_add():
        return
    if not _has(config, override.key_or_group):
        raise InputError(_unknown_key(str(override.input_line), override.key_or_group, config, choices))


def _check_experiment(door_name: str, search: Sequence[str], config: DictConfig, choices: dict[str, Any]) -> None:
    """An experiment overrides settings; a key that only the experiment has is a misspelling, found here and not after the run."""
    name = choices.get("experiment")
    if not name:
        return
    _, plain_choices = _load(door_name, search)
    lines = [
        f"~{group}" if choice is None else f"{'' if group in plain_choices else '+'}{group}={_quote(choice)}"
        for group, choice in {**choices, "experiment": None}.items()
        if choice != plain_choices.get(group)
    ]
    plain, _ = _load(door_name, [*search, *lines])
    added = _added(OmegaConf.to_container(config), OmegaConf.to_container(plain))  # type: ignore[arg-type]
    if added:
        raise InputError(_unknown_key(f"experiment={name} sets {added[0]}", added[0], plain, {}))


def _added(config: dict[Any, Any], plain: dict[Any, Any], prefix: str = "") -> list[str]:
    """Keys of config that plain lacks. An empty mapping in plain is open: anything may be put in it."""
    if config.get("_target_") != plain.get("_target_") or (prefix and not plain):
        return []
    found: list[str] = []
    for key, value in config.items():
        if key not in plain:
            found.append(f"{prefix}{key}")
        elif isinstance(value, dict) and isinstance(plain[key], dict):
            found += _added(value, plain[key], f"{prefix}{key}.")
    return found


def _quote(choice: Any) -> str:
    if isinstance(choice, list):
        return "[" + ",".join(map(str, choice)) + "]"
    return str(choice)


def _escape(value: str) -> str:
    """Text as OmegaConf must hold it to give the same text back: interpolation marks are data here."""
    return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", value)


def dotted_keys(config: DictConfig) -> list[str]:
    """Every key of a configuration, inner nodes included, as it is written on the command line."""

    def walk(node: Any, prefix: str) -> Iterable[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield f"{prefix}{key}"
                yield from walk(value, f"{prefix}{key}.")

    return list(walk(OmegaConf.to_container(config, resolve=False), ""))


def _has(config: DictConfig, key: str) -> bool:
    node: Any = OmegaConf.to_container(config, resolve=False)
    for part in re.sub(r"\[(\w+)\]", r".\1", key).split("."):
        if isinstance(node, dict):
            names = {str(name): value for name, value in node.items()}
            if part not in names:
                return False
            node = names[part]
        elif isinstance(node, list) and part.lstrip("-").isdigit() and -len(node) <= int(part) < len(node):
            node = node[int(part)]
        else:
            return False
    return True


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """The valid names a person most likely meant: the same word in another section, or a likely misspelling; best first."""

    def alike(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    found = []
    for candidate in sorted(set(candidates)):
        tail, whole = alike(name.rpartition(".")[2], candidate.rpartition(".")[2]), alike(name, candidate)
        if tail >= 0.7 or whole >= 0.85:
            found.append((-tail - whole, candidate))
    return [candidate for _, candidate in sorted(found)[:limit]]


def _unknown_key(given: str, key: str, config: DictConfig, choices: dict[str, Any]) -> str:
    keys = [k for k in dotted_keys(config) if not k.rpartition(".")[2].startswith("_")]
    section = key.rpartition(".")[0]
    while section and section not in keys:
        section = section.rpartition(".")[0]
    if section and not OmegaConf.is_dict(OmegaConf.select(config, section, throw_on_missing=False)):
        return f"{given}: there is no setting {key}. {section} is a single value: did you mean {section}=...?"
    if section:
        inside = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section]
    else:
        inside = sorted({*(k for k in keys if "." not in k), *choices})
    near = [n for n in nearest(key, [*keys, *choices], 5) if not f"{key}.".startswith(f"{n}.")][:3]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    where = f"{section} has" if section else "The settings are"
    return f"{given}: there is no setting {key}.{hint} {where}: {_join(inside)}"


def _unknown_choice(given: str, group: str, name: str, options: Sequence[str]) -> str:
    near = nearest(name, options, limit=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{given}: there is no {group} {name}.{hint} Choices: {_join(options)}"


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


# --- building ----------------------------------------------------------------------------------------------------------


def build(node: Any, /, **objects: Any) -> Any:
    """Build what a node's `_target_` names; nested nodes are built first, lists and dicts become plain ones.

    `objects` are handed over as they are (Hydra would copy dataclass instances into configs) and win over the node's own keys.
    A key the class does not take, or one it lacks, is an InputError; errors raised by the class itself come out unwrapped.
    A node with `_partial_: true` gives a `functools.partial`. None gives None.
    """
    if node is None:
        return None
    if isinstance(node, dict):
        node = OmegaConf.create(node, flags={"allow_objects": True})
    if isinstance(node, ListConfig):
        return [build(item) if OmegaConf.is_config(item) else item for item in node]
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise InputError(f"cannot build {node!r}: the node names no _target_")
    wants_partial = bool(node.get("_partial_", False))
    _check_calls(node, tuple(objects))
    try:
        make = hydra.utils.instantiate(node, _convert_="all", _partial_=True)
    except InstantiationException as error:
        raise _unwrap(error) from None
    except OmegaConfBaseException as error:
        raise InputError(f"{node._get_full_key(None) or 'configuration'}: {first_line(error)}") from error
    call = functools.partial(make.func, *make.args, **{**make.keywords, **objects})
    return call if wants_partial else call()


def _unwrap(error: BaseException) -> BaseException:
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    return InputError(str(cause)) if isinstance(cause, InstantiationException) else cause


def _check_calls(node: DictConfig, extra: tuple[str, ...] = ()) -> None:
    """Refuse keys that a target does not take, before anything is built."""
    for key in node:
        child = None if OmegaConf.is_missing(node, key) else node[key]
        for inner in child if isinstance(child, ListConfig) else [child]:
            if isinstance(inner, DictConfig) and not inner._is_none():
                _check_calls(inner)
    if "_target_" not in node:
        return
    where = node._get_full_key(None) or "node"
    try:
        target = hydra.utils.get_object(node["_target_"])
    except Exception as error:
        raise InputError(f"{where}._target_={node['_target_']} cannot be imported: {first_line(error)}") from error
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    given = [str(k) for k in node if not (str(k).startswith("_") and str(k).endswith("_"))]
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        for key in (*given, *extra):
            if key not in named:
                near = nearest(key, named, limit=1)
                hint = f" Did you mean {where}.{near[0]}?" if near else ""
                raise InputError(f"{where}.{key}: {target.__name__} has no setting {key}.{hint} It takes: {_join(named)}")
    if node.get("_partial_", False) or "_args_" in node:
        return
    lacking = [n for n, p in named.items() if p.default is p.empty and n not in given and n not in extra]
    if lacking:
        raise InputError(f"{where}: {target.__name__} also needs {_join(lacking)}")


# --- doors -------------------------------------------------------------------------------------------------------------


def door(name: str, *, text: Sequence[str] = ("prompt",)) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Make a command of a function: `conf/<name>.yaml` composed with the command line, errors as one line, exit codes.

    The command takes `key=value` words, `--help`, `--cfg job` (print the configuration; `--resolve` to resolve references) and
    `--config-dir DIR` (one's own configurations). Exit codes: 0 done, 2 wrong input or disk full, 130 interrupted.

    Args:
        name: the primary configuration and the door's name.
        text: keys whose value is taken literally (a prompt may hold any character).
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def command(argv: Sequence[str] | None = None) -> Any:
            words = list(sys.argv[1:] if argv is None else argv)
            before = runs.current
            try:
                options, overrides = _options_of(words)
                if options["help"]:
                    print(_help(name, main, overrides, text, options["config_dir"]))
                    return None
                invocation = _compose(
                    name, overrides, text=text, config_dir=options["config_dir"], check_missing=not options["cfg"]
                )
                if options["cfg"]:
                    print(OmegaConf.to_yaml(invocation.config, resolve=options["resolve"]), end="")
                    return None
                runs.current = invocation
                return main(invocation.config)
            except KeyboardInterrupt:
                _complain(name, "interrupted")
                raise SystemExit(130) from None
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(1) from None
            except Exception as error:
                message = str(error) if isinstance(error, InputError) else disk_full(error)
                if not message:
                    raise
                if os.environ.get(TRACEBACK_VARIABLE, "0") != "0" or os.environ.get("HYDRA_FULL_ERROR", "0") != "0":
                    traceback.print_exc()
                _complain(name, message)
                raise SystemExit(2) from None
            finally:
                runs.current = before

        return command

    return decorate


def _complain(name: str, message: str) -> None:
    place = f" (rank {rank()})" if world_size() > 1 else ""
    print(f"drafttrain.{name}{place}: {message}", file=sys.stderr, flush=True)


def _options_of(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {"help": False, "cfg": False, "resolve": False, "config_dir": None}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            options["help"] = True
        elif word == "--resolve":
            options["resolve"] = True
        elif flag in ("--cfg", "-c"):
            kind = value if equals else (queue.pop(0) if queue else "")
            if kind != "job":
                raise InputError(f"{flag} {kind}: only `--cfg job` is known; it prints the configuration")
            options["cfg"] = True
        elif flag in ("--config-dir", "-cd"):
            options["config_dir"] = value if equals else (queue.pop(0) if queue else "")
        elif word in ("--multirun", "-m"):
            raise InputError(f"{word}: one command makes one run; for a sweep, loop in the shell")
        elif word.startswith("-"):
            raise InputError(f"{word}: unknown option; settings are key=value, options are --help, --cfg job, --config-dir DIR")
        else:
            rest.append(word)
    return options, rest


def _help(
    name: str, main: Callable[..., Any], overrides: Sequence[str], text: Sequence[str], config_dir: str | None
) -> str:
    invocation = _compose(name, overrides, text=text, config_dir=config_dir, check_missing=False)
    search = _search(config_dir)
    module = sys.modules.get(main.__module__)
    about = inspect.cleandoc((module.__doc__ if module else None) or main.__doc__ or name)
    lines = [about, "", f"Usage: python -m drafttrain.{name} [key=value ...] [--cfg job [--resolve]] [--config-dir DIR]", ""]
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=name):
        if invocation.choices:
            lines.append("Choices (group=choice; * is chosen now)")
            for group, chosen in sorted(invocation.choices.items()):
                picked = chosen if isinstance(chosen, list) else [chosen]
                shown = _join(("*" if option in picked else "") + option for option in _options(group, search))
                lines.append(f"  {group}: {shown}")
            lines.append("")
    lines.append("Settings (section.key=value; ??? must be given)")
    said = _all_comments(name, invocation.choices)
    parents: list[str] = []
    for line in OmegaConf.to_yaml(invocation.config).splitlines():
        match = re.match(r"^( *)([\w-]+):", line)
        if match:
            parents = [*parents[: len(match.group(1)) // 2], match.group(2)]
            meaning = said.get(".".join(parents), "")
            indent = f"  {match.group(1)}# "
            lines += textwrap.wrap(meaning, 118, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"  {line}")
    return "\n".join(lines)
