"""Heads of multi-token prediction that targets are shipped with: where each family keeps them in
the target's own files, which `transformers` does not read with the model.

| family                | tensors                                                   | joins     |
|-----------------------|-----------------------------------------------------------|-----------|
| DeepSeek-V3, GLM MoE  | model.layers.{n}. enorm, hnorm, eh_proj, shared_head.norm | [E(x); h] |
| Qwen3-Next, Qwen3.5   | mtp. pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm  | [E(x); h] |
| MiMo                  | model.mtp_layers.0. token_layernorm, hidden_layernorm,    | [h; E(x)] |
|                       | input_proj, final_layernorm                               |           |

n is the number of the target's layers. The tensors of the head's decoder layer have their usual
names: at the same level, for Qwen after mtp.layers.0. Experts are kept one by one, or together as
`transformers` has them. Read from: vLLM 0.32 model_executor/models/*_mtp.py, transformers 5.24
modeling_layers.py and conversion_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafttrain.errors import InputError, first_line
from drafttrain.target.model import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPERTS = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names are without `.weight`."""

    name: str
    architectures: tuple[str, ...]
    """By a config's `architectures`, or by the class of the model."""
    counts: tuple[str, ...]
    """Settings of config.json that say how many modules there are; the first is written."""
    prefix: str
    """Of the module's tensors, {n} being its number."""
    block: str
    """Of those of its decoder layer."""
    after: bool = False
    """Does {n} go on after the target's layers? Else it starts from 0."""
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    embedding_first: bool = True
    """Is the embedding the first half of what `join` reads?"""
    blank_first: bool = False
    """Is the embedding of a text's first row zero?"""
    embedding_copy: str = ""
    """A copy of the target's embedding, if it has one."""
    head_copy: str = ""
    """A copy of the target's head, if it has one."""


_AFTER = {
    "counts": ("num_nextn_predict_layers", "num_mtp_layers"),
    "prefix": "model.layers.{n}.",
    "block": "model.layers.{n}.",
    "after": True,
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
    "embedding_copy": "embed_tokens",
    "head_copy": "shared_head.head",
}
FAMILIES = (
    Family(name="DeepSeek-V3", architectures=("DeepseekV3ForCausalLM",), **_AFTER),  # type: ignore[arg-type]
    Family(name="GLM-4 MoE", architectures=("Glm4MoeForCausalLM",), **_AFTER),  # type: ignore[arg-type]
    Family(
        name="Qwen3-Next",
        architectures=(
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        prefix="mtp.",
        block="mtp.layers.{n}.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        join="fc",
        norm="norm",
    ),
    Family(
        name="MiMo",
        architectures=("MiMoForCausalLM",),
        counts=("num_nextn_predict_layers",),
        prefix="model.mtp_layers.{n}.",
        block="model.mtp_layers.{n}.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        join="input_proj",
        norm="final_layernorm",
        embedding_first=False,
        blank_first=True,
    ),
)


def family_of(target: Target) -> Family:
    """Raises: InputError for a family without such heads."""
    said = [
        *(getattr(target.model.config, "architectures", None) or ()),
        type(target.model).__name__,
    ]
    for family in FAMILIES:
        if any(name in family.architectures for name in said):
            return family
    raise InputError(
        f"drafter.native: target {target.name} ({said[0]}) is of no family with MTP heads of its "
        f"own that is known here ({', '.join(one.name for one in FAMILIES)}): set "
        "drafter.native=null for a module of another shape, trained from scratch"
    )


@dataclass(frozen=True)
class Place:
    """A tensor of a target's files, and the part of a module's that it is."""

    name: str
    part: Tensor
    """A view."""


def places(
    family: Family, target: Target, state: Mapping[str, Tensor], names: set[str]
) -> list[Place]:
    """Where the files keep each tensor of a module.

    Args:
        state: of a `NativeModule`.
        names: of all tensors in the files: some keep experts one by one.
    """
    prefix, block = _prefixes(family, target)
    own = {
        name: getattr(family, name) for name in ("embedding_norm", "hidden_norm", "join", "norm")
    }
    found: list[Place] = []
    for name, tensor in state.items():
        first, _, rest = name.partition(".")
        if first in own:
            found.append(Place(f"{prefix}{own[first]}.{rest}", tensor))
        elif block + rest in names or not (experts := _EXPERTS.match(rest)):
            found.append(Place(block + rest, tensor))
        else:
            found += _apart(block + experts[1], experts[2], tensor)
    return found


def _prefixes(family: Family, target: Target) -> tuple[str, str]:
    """Of the module's tensors, and of those of its layer."""
    n = len(target.decoder_layers) if family.after else 0
    return family.prefix.format(n=n), family.block.format(n=n)


def _apart(prefix: str, name: str, tensor: Tensor) -> Iterator[Place]:
    """(e i o) of all experts, one by one."""
    for number, one in enumerate(tensor):
        if name == "down_proj":
            yield Place(f"{prefix}.{number}.down_proj.weight", one)
        else:
            for part, half in zip(("gate", "up"), one.chunk(2), strict=True):
                yield Place(f"{prefix}.{number}.{part}_proj.weight", half)


def copies(family: Family, target: Target) -> dict[str, Tensor]:
    """{name: tensor}: what the head's tensors repeat of the target."""
    prefix, _ = _prefixes(family, target)
    both = ((family.embedding_copy, target.embedding), (family.head_copy, target.output))
    return {f"{prefix}{name}.weight": module.weight for name, module in both if name}


# --- the target's files ---------------------------------------------------------------------------


def directory_of(target: Target) -> Path:
    """Where a target was read from.

    Raises: InputError for one that was not read from files, such as a tiny one.
    """
    config = target.model.config
    name = getattr(config, "_name_or_path", "") or ""
    if name and Path(name).is_dir():
        return Path(name)
    if name:
        from transformers.utils.hub import cached_file

        try:
            found = cached_file(
                name,
                "config.json",
                revision=getattr(config, "_commit_hash", None),
                local_files_only=True,
            )
            return Path(str(found)).parent
        except Exception as error:
            raise InputError(
                f"target {target.name}: its files are not on this machine: {first_line(error)}"
            ) from error
    raise InputError(
        f"drafter.native: target {target.name} was not read from files, so it has no head of its "
        "own there: give target=hf target.path=<directory>"
    )


def files_of(folder: Path) -> dict[str, Path]:
    """{tensor: file} of all of a directory's safetensors files, by their headers.

    Raises: InputError if one cannot be read.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    return found


def ships(target: Target) -> bool:
    """Do its files hold a head? Raises: InputError as `family_of` and `directory_of` do."""
    return bool(_held(family_of(target), target, files_of(directory_of(target))))


def _held(family: Family, target: Target, files: Mapping[str, Path]) -> list[str]:
    """Names of all tensors of its heads."""
    if not family.after:
        start = family.prefix.partition("{n}")[0]
        return sorted(name for name in files if name.startswith(start))
    n = len(target.decoder_layers)
    layer = re.compile(re.escape(family.prefix.partition("{n}")[0]) + r"(\d+)\.")
    return sorted(name for name in files if (match := layer.match(name)) and int(match[1]) >= n)


def load_shipped(target: Target, state: Mapping[str, Tensor], folder: Path | None = None) -> None:
    """Fill a module's tensors with those of files.

    Args:
        state: of a `NativeModule` of this target.
        folder: where the head is, if not among the target's own files: that of the model that the
            target was tuned from.
    Raises: InputError if the files hold none, more than one module, one that lacks tensors or has
        others, or weights that are no plain finite numbers.
    """
    family, where = family_of(target), folder or directory_of(target)
    files = files_of(where)
    held = _held(family, target, files)
    wanted = places(family, target, state, set(files))
    if not held:
        prefix, _ = _prefixes(family, target)
        raise InputError(
            f"{where} holds no MTP head ({family.name} keeps it as {prefix}*): it was left out "
            "when the model was saved; train a new one with drafter.native=new"
        )
    if lost := sorted({place.name for place in wanted} - files.keys()):
        raise InputError(
            f"{where}: of its MTP head {len(lost)} tensors are lost, such as {lost[0]}: get the "
            "model again, or train a new head with drafter.native=new"
        )
    repeated = copies(family, target)
    if more := sorted(set(held) - {place.name for place in wanted} - repeated.keys()):
        raise InputError(
            f"{where}: its MTP head has {len(more)} tensors that one module of this family has "
            f"not, such as {more[0]}: a single module of plain weights is used here"
        )
    for name in sorted(repeated.keys() & files.keys()) if folder is None else ():
        if not torch.equal(_read(files[name], name).to(repeated[name]), repeated[name]):
            raise InputError(f"{where}: {name} is not the target's own, which is borrowed here")
    for place in wanted:
        value = _read(files[place.name], place.name)
        if value.shape != place.part.shape:
            raise InputError(
                f"{where}: {place.name} is {list(value.shape)}, needs {list(place.part.shape)}"
            )
        with torch.no_grad():
            place.part.copy_(value)


def _read(path: Path, name: str) -> Tensor:
    """Raises: InputError for what is no plain finite weight."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if tensor.dtype not in FLOATS:
        word = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{path}: {name} is {word}: quantised heads are not read")
    if not bool(tensor.isfinite().all()):
        raise InputError(f"{path}: NaN or infinite values in {name}: get the model again")
    return tensor
