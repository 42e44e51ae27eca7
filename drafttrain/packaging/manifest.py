"""A package: a folder that decodes by itself. Nothing in it is trusted when it is read.

config.json             format, the drafter's class and settings, needs, shape, target fingerprint,
                        how it was trained
drafter.safetensors     trained tensors, and ids of a reduced draft vocabulary or of a corpus; empty
                        for a drafter without any; never the target's embedding or head
adapter.safetensors     what joint training added to the target's weights, where it did;
                        config.json then says so
ssm/                    a drafter that is a language model, as a directory of transformers: the only
                        copy of its tensors, where it borrows nothing of the target; otherwise a
                        complete copy, if one was asked for
decoding.yaml           tree, policy and rule
metrics.json            measured acceptance and speed
README.md               model card
custom_generate/        lets transformers decode with it

Here: the names of these files, and config.json with the checks that need no other file.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from drafttrain.checks import is_count, pasted, path_of
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.standalone import owns_all
from drafttrain.errors import InputError
from drafttrain.packaging.checking import check_characters, check_keys, read_json, some
from drafttrain.target import fingerprint
from drafttrain.target.adapter import LARGEST_RANK
from drafttrain.target.model import Target

FORMAT = 1
CONFIG, TENSORS, DECODING, METRICS, CARD = (
    "config.json",
    "drafter.safetensors",
    "decoding.yaml",
    "metrics.json",
    "README.md",
)
CUSTOM = "custom_generate"
EXPORTED = "drafttrain.json"
"""In a directory for an engine that was made of a package, and in no package."""
ADAPTER = "adapter.safetensors"
FILES = (
    CONFIG,
    TENSORS,
    DECODING,
    METRICS,
    CARD,
    f"{CUSTOM}/generate.py",
    f"{CUSTOM}/requirements.txt",
)
PACKAGE = "package"
"""The folder of a run that holds its package."""
STANDALONE = "ssm"
STANDALONE_CONFIG, STANDALONE_TENSORS = (
    f"{STANDALONE}/config.json",
    f"{STANDALONE}/model.safetensors",
)
STANDALONE_FILES = (STANDALONE_CONFIG, STANDALONE_TENSORS)
"""Of a drafter that is a language model."""
FOLDERS = (CUSTOM, STANDALONE)
ALL_FILES = (*FILES, ADAPTER, *STANDALONE_FILES)
"""Of any package; FILES are those of every one."""
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Dtypes of stored weights, and their names in a safetensors header."""

STORED = ("draft_ids", "corpus_ids")
"""Settings that are long lists of ids: they are stored as tensors, not in the config."""
MEMBERS = "members"
"""The setting of a drafter that holds others: each with its class, draft vocabulary and settings,
its tensors under its number."""

_KEYS = ("format", "made_with", "drafter", "needs", "shape", "trained_length", "target", "training")
_NEEDS = ("last_hidden", "layers", "logits")
_SHAPE = ("width", "vocab_size", "draft_vocab", "parameters", "dtype")
_TARGET = ("name", "model_type", "licence", "fingerprint")
_ADAPTER = ("rank", "alpha", "linears", "parameters", "digest")
PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
_LARGEST_CONFIG = 16 << 20
_MOST = 1e15
"""More than any number of seconds."""
_CLASS = re.compile(r"(drafttrain\.drafter\.[a-z_][a-z0-9_]*)\.([A-Z]\w*)")


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`config.json` of a package, checked as far as that goes without its target. Needs no target
    and little time.

    Raises: InputError if the folder is no package, holds pickled files, or its config is not
    exactly of this format.
    """
    folder = path_of("package", folder)
    _check_folder(folder)
    path = folder / CONFIG
    config = check_characters(read_json(path, _LARGEST_CONFIG, "a package's config"), path)
    form = config.get("format") if isinstance(config, dict) else None
    if form != FORMAT or isinstance(form, bool):
        newer = isinstance(form, int) and form > FORMAT
        raise InputError(
            f"{path}: format {str(form)[:40]}, this version reads {FORMAT}: "
            + ("update drafttrain" if newer else "make the package again")
        )
    check_keys(config, _KEYS, str(path), optional=("adapter",))
    for name, known in (("needs", _NEEDS), ("shape", _SHAPE), ("target", _TARGET)):
        check_keys(config[name], known, f"{path}: {name}")
    _check_adapter(config, folder)
    _check_values(config, path)
    found: dict[str, Any] = config
    return found


def _check_folder(folder: Path) -> None:
    """Raise InputError unless a folder has a package's files, and none that is pickled."""
    if not folder.is_dir():
        raise InputError(
            f"package={folder} {'is a file' if folder.exists() else 'does not exist'}: give a "
            "package's folder"
        )
    inside = (folder / STANDALONE).iterdir() if (folder / STANDALONE).is_dir() else ()
    pickled = sorted(
        path.name for path in (*folder.iterdir(), *inside) if path.suffix.lower() in PICKLED
    )
    if pickled:
        raise InputError(
            f"{folder} holds {some(pickled)}: such files can run code when read; only safetensors "
            "is accepted"
        )
    lacking = [name for name in (CONFIG, TENSORS, DECODING) if not (folder / name).is_file()]
    if lacking:
        hint = "a package is made by python -m drafttrain.fit"
        if CONFIG not in lacking and not is_package(folder):
            hint = "this looks like a target, which is given as target=hf target.path=<folder>"
        if (folder / EXPORTED).is_file():
            hint = (
                "it is an export for an engine; give the package it was made from, or make one of "
                f"it: python -m drafttrain.adopt {pasted('head', folder)} out=<new folder>"
            )
        raise InputError(f"{folder} is not a package, it lacks {', '.join(lacking)}: {hint}")


def _check_values(config: dict[str, Any], path: Path) -> None:
    """Raise InputError unless every value of a config is of its kind, those of an adapter apart."""
    marks = config["target"]["fingerprint"]
    if not isinstance(marks, dict) or not all(isinstance(value, str) for value in marks.values()):
        raise InputError(f"{path}: target.fingerprint is not a mapping of digests")
    length = config["trained_length"]
    if length is not None and (type(length) is not int or length < 1):
        raise InputError(
            f"{path}: trained_length is {str(length)[:40]}, needs a count of tokens or null"
        )
    for name in ("drafter", "training"):
        if not isinstance(config[name], dict):
            raise InputError(f"{path}: {name} is not a mapping")
    shape, target = config["shape"], config["target"]
    for name in ("width", "vocab_size", "draft_vocab", "parameters"):
        if type(shape[name]) is not int or shape[name] < 0:
            raise InputError(f"{path}: shape.{name} is {str(shape[name])[:40]}, needs an integer")
    for name in ("name", "model_type", "licence"):
        absent = name == "licence" and target[name] is None
        if not absent and not isinstance(target[name], str):
            raise InputError(f"{path}: target.{name} is {str(target[name])[:40]}, needs text")
    if not isinstance(shape["dtype"], str) or shape["dtype"] not in DTYPES:
        raise InputError(
            f"{path}: shape.dtype is {str(shape['dtype'])[:40]}: one of {', '.join(DTYPES)} is read"
        )
    if not isinstance(config["drafter"].get("_target_"), str):
        raise InputError(f"{path}: drafter lacks _target_, the name of its class")


def _check_adapter(config: dict[str, Any], folder: Path) -> None:
    """Raise InputError unless config.json and the files agree on whether the target was trained
    too, and how."""
    there = (folder / ADAPTER).is_file()
    if "adapter" not in config:
        if there:
            raise InputError(
                f"{folder} holds {ADAPTER}, of which {CONFIG} says nothing: get the package again"
            )
        return
    path, found = folder / CONFIG, config["adapter"]
    if not there:
        raise InputError(
            f"{folder} lacks {ADAPTER}, what was trained of its target: get the package again"
        )
    check_keys(found, _ADAPTER, f"{path}: adapter")
    rank, alpha, linears = found["rank"], found["alpha"], found["linears"]
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= LARGEST_RANK:
        raise InputError(
            f"{path}: adapter.rank is {str(rank)[:40]}, needs an integer from 1 to {LARGEST_RANK}"
        )
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e30:
        raise InputError(f"{path}: adapter.alpha is {str(alpha)[:40]}, needs a number above 0")
    if (
        not isinstance(linears, list)
        or not linears
        or not all(isinstance(name, str) for name in linears)
    ):
        raise InputError(
            f"{path}: adapter.linears is {str(linears)[:80]}, needs names such as q_proj"
        )
    if not isinstance(found["digest"], str) or type(found["parameters"]) is not int:
        raise InputError(
            f"{path}: adapter.digest is not a digest, or adapter.parameters no integer"
        )


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`metrics.json` of a package; no rows if it cannot be read."""
    try:
        return checked_metrics(folder)
    except InputError:
        return {"settings": {}, "rows": []}


def checked_metrics(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`metrics.json` of a package: a mapping with `settings`, a mapping too, and `rows`, a list of
    mappings.

    Raises: InputError if it is missing, cannot be read, or is of another form.
    """
    path = Path(folder).expanduser() / METRICS
    if not path.is_file():
        raise InputError(f"{path} is missing: the package is not complete")
    found = check_characters(
        read_json(path, _LARGEST_CONFIG, "what was measured of a package"), path
    )
    rows, settings = (
        (found.get("rows"), found.get("settings", {})) if isinstance(found, dict) else (None, None)
    )
    if (
        not isinstance(settings, dict)
        or not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
    ):
        raise InputError(f'{path} is not of the form {{"settings": {{...}}, "rows": [{{...}}]}}')
    return {**found, "settings": settings}


def parameter_count(config: dict[str, Any]) -> int | None:
    """Parameters that a package adds to its target, an adapter's included; None where the config
    does not say."""
    found = [config["shape"]["parameters"]]
    if "adapter" in config:
        found.append(config["adapter"]["parameters"])
    return sum(found) if all(is_count(number) for number in found) else None


def training_of(config: dict[str, Any]) -> tuple[float | None, int | None]:
    """Seconds that training took, without the decoding of held-out prompts in between; supervised
    tokens that were read, those of every epoch counted. Of several fits the sum, those that only
    marked rows counted. Where nothing was learned, the seconds of a search, or 0; None where they
    were not recorded."""
    noted = config["training"].get("training")
    noted = noted if isinstance(noted, dict) else {}
    if (
        not class_of(config["drafter"]["_target_"], CONFIG).learns
        and not config["shape"]["parameters"]
    ):
        searched = noted.get("search_seconds")
        return float(searched) if _amount(searched) else 0.0, 0
    fits, marking = noted.get("members"), noted.get("marking", [])
    fits = [*fits, *marking] if isinstance(fits, list) and isinstance(marking, list) else [noted]
    each = [_cost_of(fit if isinstance(fit, dict) else {}) for fit in fits]
    seconds = [one for one, _ in each if one is not None]
    tokens = [one for _, one in each if one is not None]
    return (
        sum(seconds) if 0 < len(seconds) == len(each) else None,
        sum(tokens) if 0 < len(tokens) == len(each) else None,
    )


def _cost_of(fit: dict[str, Any]) -> tuple[float | None, int | None]:
    names = ("seconds", "supervised_tokens_seen", "evaluation_seconds")
    seconds, tokens, aside = (fit.get(name) for name in names)
    if _amount(seconds) and _amount(aside):
        seconds = max(0.0, seconds - aside)
    return float(seconds) if _amount(seconds) else None, tokens if is_count(tokens) else None


def _amount(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def check_target(
    config: dict[str, Any], target: Target, folder: str | os.PathLike[str] = "the package"
) -> None:
    """Raise InputError unless a package's config names this very target, or what the package made
    of it by joint training.

    A target without its tokenizer is known by its config and weights: drafts are ids.
    """
    stored: dict[str, str] = dict(config["target"]["fingerprint"])
    here = dict(target.fingerprint)
    if target.adapter is not None and "adapter" in config:
        stored[fingerprint.ADAPTER] = config["adapter"]["digest"]
    if target.tokenizer is None:
        here.update(
            {part: stored[part] for part in ("tokenizer", "chat_template") if part in stored}
        )
    name = str(config["target"]["name"])[:80]
    try:
        fingerprint.refuse_other(stored, here, str(folder), own=target.tokenizer)
    except InputError as error:
        raise InputError(
            f"{error}. The package was trained for {name}, this is {target.name}"
        ) from error
    for fact, own in (("width", target.width), ("vocab_size", target.vocab_size)):
        if config["shape"][fact] != own:
            raise InputError(
                f"{folder}: shape.{fact} is {str(config['shape'][fact])[:40]}, the target has {own}"
            )


def is_package(folder: Path) -> bool:
    try:
        if not (folder / CONFIG).is_file() or (folder / CONFIG).stat().st_size > _LARGEST_CONFIG:
            return False
        found = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    drafter = found.get("drafter") if isinstance(found, dict) else None
    return isinstance(drafter, dict) and str(drafter.get("_target_", "")).startswith("drafttrain.")


def class_of(name: str, where: str) -> type[Drafter]:
    """The drafter class of that name. Nothing outside drafttrain.drafter is imported for it."""
    match = _CLASS.fullmatch(name)
    found = None
    if match and importlib.util.find_spec(match.group(1)) is not None:
        found = getattr(importlib.import_module(match.group(1)), match.group(2), None)
        if not (
            isinstance(found, type)
            and issubclass(found, Drafter)
            and found.__module__ == match.group(1)
        ):
            found = None
    if found is None or inspect.isabstract(found):
        raise InputError(
            f"{where}: {name[:120]!r} is not a drafter of drafttrain "
            "(drafttrain.drafter.<file>.<Class>)"
        )
    return found


def place_of(name: str, drafter: Drafter) -> tuple[str, str]:
    """The file that holds a tensor of this drafter, and its name there."""
    prefix = "model."
    if owns_all(drafter) and name.startswith(prefix):
        return STANDALONE_TENSORS, name.removeprefix(prefix)
    return TENSORS, name


def owned(drafter: Drafter) -> dict[str, Tensor]:
    """A drafter's tensors by name, each once: of names that are tied the first."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in drafter.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def needs_of(drafter: Drafter) -> dict[str, Any]:
    needs = drafter.needs
    return {"last_hidden": needs.last_hidden, "layers": list(needs.layers), "logits": needs.logits}
