"""A package: a folder that decodes by itself, and is trusted with nothing when it is read.

config.json             format, the drafter's class and settings, needs, shape, target fingerprint, how it was trained
drafter.safetensors     trained tensors and the ids of a reduced draft vocabulary; never the target's embedding or head
decoding.yaml           tree, policy and rule
metrics.json            measured acceptance and speed
README.md               model card
custom_generate/        lets transformers decode with it
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafttrain.decoding.loop import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.packaging.card import GENERATE, REQUIREMENTS, card
from drafttrain.packaging.checking import check_keys, some
from drafttrain.packaging.decoding import fit, read_plan, write_plan
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.version import version

FORMAT = 1
CONFIG, TENSORS, DECODING, METRICS, CARD = (
    "config.json",
    "drafter.safetensors",
    "decoding.yaml",
    "metrics.json",
    "README.md",
)
CUSTOM = "custom_generate"
FILES = (CONFIG, TENSORS, DECODING, METRICS, CARD, f"{CUSTOM}/generate.py", f"{CUSTOM}/requirements.txt")

_KEYS = ("format", "made_with", "drafter", "needs", "shape", "trained_length", "target", "training")
_NEEDS = ("last_hidden", "layers", "logits")
_SHAPE = ("width", "vocab_size", "draft_vocab", "parameters", "dtype")
_TARGET = ("name", "model_type", "licence", "fingerprint")
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_HEADER_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
_PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
_LARGEST_CONFIG = 16 << 20
_CLASS = re.compile(r"(drafttrain\.drafter\.[a-z_][a-z0-9_]*)\.([A-Z]\w*)")

LICENCES = {"smollm2": "Apache-2.0"}
"""Licences of targets that are known by name."""


# --- writing -----------------------------------------------------------------------------------------------------------


def save_package(
    folder: str | os.PathLike[str],
    *,
    drafter: Drafter,
    target: Target,
    plan: Plan,
    metrics: dict[str, Any],
    provenance: dict[str, Any],
    trained_length: int | None = None,
    dtype: str = "float32",
    licence: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write a package beside its place, then put it there whole; an earlier package is replaced.

    Args:
        folder: a new or empty folder, or an earlier package. A folder with other files is refused, a link too.
        plan: how it decodes unless told otherwise.
        metrics: `{"settings": {...}, "rows": [...]}`, rows as `Measurement.row` gives them; may have no rows.
        provenance: how it was trained, plain JSON values.
        trained_length: most tokens of a row in training; None takes provenance["trained_length"], if it is there.
        dtype: of the stored weights: float32 (bit for bit) or bfloat16 (half the size).
        licence: the target's; None looks it up by the target's name.
        say: is told the size.
    Returns: the folder.
    Raises: InputError if the place cannot be used or the weights are not finite; OSError if the disk is full. What lay
        there before is then still whole.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    check_place(folder)
    if dtype not in _DTYPES:
        raise InputError(f"package dtype is {dtype}: give one of {', '.join(_DTYPES)}")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("rows"), list):
        raise ValueError('metrics need the form {"settings": {...}, "rows": [...]}')
    plan = fit(plan, drafter)
    tensors = _tensors_of(drafter, target, getattr(torch, dtype))
    if trained_length is None:
        trained_length = provenance.get("trained_length")
    config: dict[str, Any] = {
        "format": FORMAT,
        "made_with": f"drafttrain {version()}",
        "drafter": {"_target_": f"{type(drafter).__module__}.{type(drafter).__qualname__}", **_settings_of(drafter)},
        "needs": _needs_of(drafter),
        "shape": {
            "width": target.width,
            "vocab_size": target.vocab_size,
            "draft_vocab": drafter.choices,
            "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
            "dtype": dtype,
        },
        "trained_length": trained_length,
        "target": {
            "name": _short(target.name),
            "model_type": target.config.model_type,
            "licence": licence or LICENCES.get(target.name),
            "fingerprint": target.fingerprint,
        },
        "training": provenance,
    }
    _class_of(config["drafter"]["_target_"], "this drafter")
    texts = {
        CONFIG: _json(config),
        DECODING: write_plan(plan),
        METRICS: _json(metrics),
        CARD: card(config, metrics, plan),
        f"{CUSTOM}/generate.py": GENERATE,
        f"{CUSTOM}/requirements.txt": REQUIREMENTS,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (scratch / CUSTOM).mkdir()
        save_file(tensors, scratch / TENSORS, metadata={"format": "pt"})
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for name in FILES:
            with (scratch / name).open("rb") as file:
                os.fsync(file.fileno())
            (scratch / name).chmod(0o644)
        scratch.chmod(0o755)
        check_place(folder)
        _put(scratch, folder)
    finally:
        _remove(scratch)
    if say:
        weights, whole = ((folder / TENSORS).stat().st_size, size_of(folder))
        say(f"package {folder}: {whole / 1e6:.2f} MB, of it {weights / 1e6:.2f} MB {dtype} weights")
    return folder


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raise InputError unless a package can be written there without touching anything that is not a package's.

    Worth calling before long work.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.is_symlink():
        raise InputError(f"{folder} is a link: give the folder itself, what a link leads to is never replaced")
    if not folder.exists():
        above = next(parent for parent in folder.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(f"{folder} cannot be made: {above} is not a folder that can be written to")
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    here = Path.cwd().resolve()
    if here == folder.resolve() or folder.resolve() in here.parents:
        raise InputError(f"{folder} holds the folder this program runs in: give a folder of its own")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be replaced: {folder.parent} cannot be written to")
    held = _held(folder)
    foreign = [name for name in held if name not in (*FILES, CUSTOM)]
    links = [name for name in held if (folder / name).is_symlink()]
    if foreign or links:
        what = f"other files ({some(foreign)})" if foreign else f"links ({some(links)})"
        raise InputError(f"{folder} holds {what}, which would be lost: give a folder of its own")
    if held and not _is_package(folder):
        raise InputError(f"{folder} holds {some(held)} but is not a drafttrain package: give a folder of its own")


def size_of(folder: str | os.PathLike[str]) -> int:
    """Bytes of a package."""
    return sum((Path(folder) / name).stat().st_size for name in FILES if (Path(folder) / name).is_file())


def _held(folder: Path) -> list[str]:
    """Names in a folder, those in custom_generate included."""
    names = []
    for entry in sorted(folder.iterdir()):
        names.append(entry.name)
        if entry.name == CUSTOM and entry.is_dir() and not entry.is_symlink():
            names += [f"{CUSTOM}/{inner.name}" for inner in sorted(entry.iterdir())]
    return names


def _is_package(folder: Path) -> bool:
    try:
        found = json.loads((folder / CONFIG).read_bytes()[:_LARGEST_CONFIG])
    except (OSError, ValueError, RecursionError):
        return False
    drafter = found.get("drafter") if isinstance(found, dict) else None
    return isinstance(drafter, dict) and str(drafter.get("_target_", "")).startswith("drafttrain.")


def _put(scratch: Path, folder: Path) -> None:
    """The new package in the place of nothing, an empty folder, or an earlier one, which is kept until the new one is there."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        old.rmdir()  # some systems do not rename onto a folder that exists
        folder.rename(old)
    try:
        scratch.rename(folder)
    except BaseException:
        if old is not None:
            old.rename(folder)
        raise
    if old is not None:
        _remove(old)


def _remove(folder: Path) -> None:
    """A package's own files and the folders they leave empty; nothing else is ever removed."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (folder / CUSTOM, folder):
        try:
            path.rmdir()
        except OSError:
            pass


def _tensors_of(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if bad:
        raise InputError(
            f"the drafter holds NaN or infinite weights in {some(bad)}: it is not packaged; train it again"
        )
    for name, tensor in drafter.state_dict().items():
        for borrowed in (target.embedding.weight, target.output.weight if target.output is not None else None):
            if borrowed is not None and tensor.shape == borrowed.shape and torch.equal(tensor.to(borrowed), borrowed):
                raise ValueError(f"{name} is the target's own embedding or head: it is borrowed, not packaged")
    return tensors


def _settings_of(drafter: Drafter) -> dict[str, Any]:
    """Settings apart from those that are stored as tensors."""
    return {name: value for name, value in drafter.settings().items() if name != "draft_ids"}


def _short(name: str) -> str:
    """A target's name without the folders of this machine."""
    local = Path(name).expanduser()
    return local.resolve().name if local.is_absolute() or local.exists() else name


def _needs_of(drafter: Drafter) -> dict[str, Any]:
    needs = drafter.needs
    return {"last_hidden": needs.last_hidden, "layers": list(needs.layers), "logits": needs.logits}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# --- reading -----------------------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str], target: Target | nn.Module, *, dtype: str = "auto") -> Speculator:
    """A package and the target it was trained for, ready to `generate` and `stream`.

    Args:
        target: a `Target`, or a transformers causal LM, which is then frozen.
        dtype: the drafter's while decoding, see `Speculator`.
    Does not move the random state.

    Raises: InputError naming what is missing, unknown, damaged, or meant for another target.
    """
    if isinstance(target, nn.Module):
        target = Target(target, None, getattr(target.config, "_name_or_path", "") or type(target).__name__)
    folder = Path(folder).expanduser()
    drafter = load_drafter(folder, target)
    plan = read_plan(folder / DECODING, drafter)
    with _chance_kept(target):
        return Speculator(target, drafter, plan, dtype=dtype)


def load_drafter(folder: str | os.PathLike[str], target: Target) -> Drafter:
    """The drafter of a package as it was trained, in evaluation mode.

    Only safetensors is read, and only after everything about it fits: a class of drafttrain.drafter, exact settings,
    this target, names, shapes and dtypes of all tensors. Does not move the random state.

    Raises: InputError.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    kind = _class_of(config["drafter"]["_target_"], str(folder / CONFIG))
    settings = _checked_settings(config["drafter"], kind, folder)
    check_target(config, target, folder)
    path = folder / TENSORS
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: _facts(file, name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if "draft_ids" in _parameters(kind):
                settings["draft_ids"] = _draft_ids(file, found, config, target, path)
            drafter = _built(kind, target, settings, folder)
            if (needs := _needs_of(drafter)) != config["needs"]:
                raise InputError(f"{folder / CONFIG}: needs are {config['needs']}, this drafter has {needs}")
            expected = {name: (tuple(t.shape), _stored(t, config)) for name, t in drafter.state_dict().items()}
            _compare(found, expected, path)
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if bad:
        raise InputError(f"{path}: NaN or infinite values in {some(bad)}: the package is damaged, get it again")
    drafter.load_state_dict(tensors)
    return drafter.eval()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`config.json` of a package, checked as far as that goes without its target. Needs no target and little time.

    Raises: InputError if the folder is no package, holds pickled files, or its config is not exactly of this format.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"package={folder} {'is a file' if folder.exists() else 'does not exist'}: give a package's folder"
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLED)
    if pickled:
        raise InputError(
            f"{folder} holds {some(pickled)}: such files can run code when read; only safetensors is accepted"
        )
    lacking = [name for name in (CONFIG, TENSORS, DECODING) if not (folder / name).is_file()]
    if lacking:
        hint = "a package is made by python -m drafttrain.fit"
        if CONFIG not in lacking and not _is_package(folder):
            hint = "this looks like a target, which is given as target=hf target.path=<folder>"
        raise InputError(f"{folder} is not a package, it lacks {', '.join(lacking)}: {hint}")
    path = folder / CONFIG
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise InputError(f"{path} has {path.stat().st_size} bytes: not a package's config")
        config = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    form = config.get("format") if isinstance(config, dict) else None
    if form != FORMAT or isinstance(form, bool):
        newer = isinstance(form, int) and form > FORMAT
        raise InputError(
            f"{path}: format {str(form)[:40]}, this version reads {FORMAT}: "
            + ("update drafttrain" if newer else "make the package again")
        )
    check_keys(config, _KEYS, str(path))
    for name, known in (("needs", _NEEDS), ("shape", _SHAPE), ("target", _TARGET)):
        check_keys(config[name], known, f"{path}: {name}")
    marks = config["target"]["fingerprint"]
    if not isinstance(marks, dict) or not all(isinstance(value, str) for value in marks.values()):
        raise InputError(f"{path}: target.fingerprint is not a mapping of digests")
    length = config["trained_length"]
    if not (length is None or (isinstance(length, int) and not isinstance(length, bool) and length > 0)):
        raise InputError(f"{path}: trained_length is {str(length)[:40]}, needs a count of tokens or null")
    for name in ("drafter", "training"):
        if not isinstance(config[name], dict):
            raise InputError(f"{path}: {name} is not a mapping")
    if config["shape"]["dtype"] not in _DTYPES:
        raise InputError(
            f"{path}: shape.dtype is {str(config['shape']['dtype'])[:40]}: one of {', '.join(_DTYPES)} is read"
        )
    if not isinstance(config["drafter"].get("_target_"), str):
        raise InputError(f"{path}: drafter lacks _target_, the name of its class")
    return config


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`metrics.json` of a package; no rows if it cannot be read."""
    try:
        found = json.loads((Path(folder) / METRICS).read_bytes())
    except (ValueError, RecursionError, OSError):
        found = None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return {"settings": {}, "rows": []}
    return found


def check_target(config: dict[str, Any], target: Target, folder: str | os.PathLike[str] = "the package") -> None:
    """Raise InputError unless a package's config names this very target.

    A target without its tokenizer is known by its config and weights: drafts are ids.
    """
    stored: dict[str, str] = config["target"]["fingerprint"]
    here = dict(target.fingerprint)
    if target.tokenizer is None:
        here.update({part: stored[part] for part in ("tokenizer", "chat_template") if part in stored})
    name = str(config["target"]["name"])[:80]
    try:
        fingerprint.refuse_other(stored, here, str(folder))
    except InputError as error:
        raise InputError(f"{error}. The package was trained for {name}, this is {target.name}") from error
    for fact, own in (("width", target.width), ("vocab_size", target.vocab_size)):
        if config["shape"][fact] != own:
            raise InputError(f"{folder}: shape.{fact} is {str(config['shape'][fact])[:40]}, the target has {own}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} stands there twice")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _class_of(name: str, where: str) -> type[Drafter]:
    """The drafter class of that name. Nothing outside drafttrain.drafter is imported for it."""
    match = _CLASS.fullmatch(name)
    found = None
    if match and importlib.util.find_spec(match.group(1)) is not None:
        found = getattr(importlib.import_module(match.group(1)), match.group(2), None)
        if not (isinstance(found, type) and issubclass(found, Drafter) and found.__module__ == match.group(1)):
            found = None
    if found is None or inspect.isabstract(found):
        raise InputError(f"{where}: {name[:120]!r} is not a drafter of drafttrain (drafttrain.drafter.<file>.<Class>)")
    return found


def _parameters(kind: type[Drafter]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(kind.__init__).parameters)
    return {name: p for name, p in parameters.items() if name not in ("self", "target")}


def _checked_settings(node: dict[str, Any], kind: type[Drafter], folder: Path) -> dict[str, Any]:
    """Exactly the settings that the class takes, each of its default's type."""
    where = f"{folder / CONFIG}: drafter"
    parameters = {name: p for name, p in _parameters(kind).items() if name != "draft_ids"}
    check_keys(node, ("_target_", *parameters), where)
    settings = {name: value for name, value in node.items() if name != "_target_"}
    for name, value in settings.items():
        default = parameters[name].default
        if default is inspect.Parameter.empty or default is None:
            continue
        fits: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
        if isinstance(default, tuple):
            fits = (list,)
        if not isinstance(value, fits) or isinstance(value, bool) != isinstance(default, bool):
            raise InputError(f"{where}.{name} is {str(value)[:80]!r}, needs {' or '.join(k.__name__ for k in fits)}")
    return settings


def _chance_kept(target: Target) -> AbstractContextManager[None]:
    """New modules draw their first weights; what a package loads replaces them, so the random state stays as it was."""
    devices = [target.device] if target.device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def _built(kind: type[Drafter], target: Target, settings: dict[str, Any], folder: Path) -> Drafter:
    try:
        with _chance_kept(target):
            return kind(target=target, **settings)
    except (TypeError, ValueError, InputError) as error:
        raise InputError(f"{folder / CONFIG}: {kind.__name__} cannot be built from its settings: {error}") from error


def _facts(file: Any, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype by the header alone."""
    part = file.get_slice(name)
    return tuple(part.get_shape()), str(part.get_dtype())


def _stored(tensor: Tensor, config: dict[str, Any]) -> str:
    return _DTYPES[config["shape"]["dtype"]] if tensor.is_floating_point() else _HEADER_DTYPES.get(tensor.dtype, "?")


def _draft_ids(
    file: Any, found: dict[str, Any], config: dict[str, Any], target: Target, path: Path
) -> list[int] | None:
    """The reduced draft vocabulary, read and checked before anything is sized by it."""
    told = config["shape"]["draft_vocab"]
    if "draft_ids" not in found:
        if told != target.vocab_size:
            raise InputError(
                f"{path} lacks draft_ids, the ids of its {str(told)[:40]} draft tokens: the package is damaged"
            )
        return None
    (shape, dtype), v = found["draft_ids"], target.vocab_size
    if dtype != "I64" or len(shape) != 1 or not 2 <= shape[0] <= v or shape[0] != told:
        raise InputError(
            f"{path}: draft_ids is {dtype} of shape {list(shape)}, needs I64 of {told} ids, at most the target's {v}"
        )
    ids = file.get_tensor("draft_ids")
    if int(ids.min()) < 0 or int(ids.max()) >= v or not bool((ids[1:] > ids[:-1]).all()):
        raise InputError(f"{path}: draft_ids must ascend within the target's vocabulary 0..{v - 1}, each id once")
    return ids.tolist()


def _compare(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raise InputError listing every tensor that is missing, unknown, or of another shape or dtype."""
    complaints = []
    if missing := sorted(expected.keys() - found.keys()):
        complaints.append(f"missing {some(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        complaints.append(f"unexpected {some(extra)}")
    odd = [
        f"{name} is {found[name][1]} {list(found[name][0])}, needs {expected[name][1]} {list(expected[name][0])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if odd:
        complaints.append(f"wrong shape or dtype: {some(odd)}")
    if complaints:
        raise InputError(f"{path}: {'; '.join(complaints)}. Nothing is loaded in part: get the package again")
