"""What is found in a directory: each fault with a name that stays, and the checks that all layouts
share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.layouts import rope
from drafttrain.layouts.directory import FLOATS, INDEX, Directory, how_to_convert
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.finding import Finding
from drafttrain.packaging.checking import some

Shapes = dict[str, tuple[int, ...]]

R_co = TypeVar("R_co", bound=Reading, covariant=True)

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
"""Names of a target's embedding in its files."""
MADE_MAP = "hot_token_ids.pt"
"""What a person makes of an export's list of ids for SGLang, which reads that list only from a
pickle."""
_LARGEST_NUMBER = 1 << 31


@dataclass
class Inspection(Generic[R_co]):
    """One directory, looked at with the eyes of one engine."""

    head: Directory
    engine: Engine
    reads: R_co
    """How that engine reads this layout."""
    target: Directory | None = None
    """The target's, to compare with; None leaves that out."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, said: str, *, fatal: bool = True) -> None:
        self.findings.append(Finding(name, said, fatal))

    def found(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)

    # config.json ----------------------------------------------------------------------------------
    @property
    def config(self) -> dict[str, Any]:
        """Of the head; where it is a speculators one, `layer_config` has the block's."""
        return self.head.config

    @property
    def target_config(self) -> dict[str, Any] | None:
        """Of the target's language model."""
        if self.target is None:
            return None
        text = self.target.config.get("text_config")
        return text if isinstance(text, dict) else self.target.config

    def integer(
        self, config: Mapping[str, Any], key: str, default: int | None = None
    ) -> int | None:
        """A positive integer; a fault where it is none, or is not there and has no default."""
        value = config.get(key, default)
        if type(value) is int and 0 < value < _LARGEST_NUMBER:
            return value
        if key in config:
            self.add("config-value", f"{key} is {str(value)[:40]}, needs a positive integer")
        else:
            self.add(
                "config-key-missing",
                f"config.json lacks {key}: the engine takes its own default, or fails",
            )
        return None

    def missing(self, key: str) -> None:
        self.add("config-key-missing", f"{key} is not given, which {self.engine.title} needs")

    def common_values(self, config: Mapping[str, Any]) -> None:
        """Keys that every engine reads for itself or by transformers, where they are given."""
        if "model_type" in config and not isinstance(config["model_type"], str):
            self.add(
                "config-value",
                f"model_type is {str(config['model_type'])[:40]}, needs a name in quotes",
            )
        for key in ("dtype", "torch_dtype"):
            if config.get(key) is not None and not _is_dtype(config[key]):
                self.add(
                    "config-value",
                    f"{key} is {str(config[key])[:40]}, needs one of torch's, such as bfloat16",
                )
        for key in ("rope_parameters", "rope_scaling"):
            if config.get(key) is not None and not isinstance(config[key], Mapping):
                self.add(
                    "config-value", f"{key} is {str(config[key])[:40]}, needs a mapping or null"
                )
        if "max_position_embeddings" in config:
            self.integer(config, "max_position_embeddings")

    def architecture(self, known: Iterable[str]) -> None:
        """The name by which the engine chooses its code."""
        names, given = list(known), self.config.get("architectures")
        if isinstance(given, list) and len(given) >= 1 and given[0] in names:
            return
        self.add(
            "architecture",
            f"architectures is {str(given)[:80]}: {self.engine} takes such a head as "
            f"{' or '.join(names)}",
        )

    # Tensors --------------------------------------------------------------------------------------
    def compare(self, expected: Shapes, optional: Shapes | None = None) -> None:
        """Names, shapes and dtypes.

        Args:
            expected: without these the engine fails or, worse, drafts from random values.
            optional: what may be there.
        """
        held, may = self.head.tensors, {**(optional or {}), **expected}
        if missing := sorted(expected.keys() - held.keys()):
            self.add(
                "tensor-missing",
                f"lacks {some(missing)}: an engine that does not notice drafts from random values",
            )
        if unknown := sorted(held.keys() - may.keys()):
            what = "passes over it" if self.reads.skips_unknown else "refuses the file"
            self.add(
                "tensor-unknown",
                f"holds {some(unknown)}: {self.engine} {what}",
                fatal=not self.reads.skips_unknown,
            )
        odd = [
            f"{n} is {list(held[n].shape)}, needs {list(may[n])}"
            for n in sorted(may)
            if n in held and held[n].shape != may[n]
        ]
        if odd:
            self.add("tensor-shape", some(odd))

    def weights(self, ids: Iterable[str] = ()) -> None:
        """Dtypes that are weights' and values that are numbers.

        Args:
            ids: tensors that hold ids or marks, which have checks of their own.
        """
        kept = set(ids)
        names = sorted(self.head.tensors.keys() - kept)
        odd = [
            f"{name} is {self.head.tensors[name].dtype}"
            for name in names
            if self.head.tensors[name].dtype not in FLOATS
        ]
        if odd:
            self.add("tensor-dtype", f"{some(odd)}: needs {', '.join(FLOATS)}")
        bad = [
            n
            for n in names
            if self.head.tensors[n].dtype in FLOATS and not bool(self.head.read(n).isfinite().all())
        ]
        if bad:
            self.add("not-finite", f"NaN or infinite values in {some(bad)}")

    def borrowed(
        self, name: str, candidates: Iterable[str], what: str, *, needed: bool = False
    ) -> None:
        """A tensor that should be the target's own, compared with it where the target is there.

        Args:
            candidates: its names in the target's files, the first one there counts.
            what: for the fault's name and message: embedding, head.
            needed: does this engine need it in the file?
        """
        if name not in self.head.tensors:
            return
        entry = self.head.tensors[name]
        theirs = (
            None
            if self.target is None
            else next((c for c in candidates if c in self.target.tensors), None)
        )
        if theirs is None or self.target is None:
            if not needed:
                self.add(
                    f"{what}-shipped",
                    f"{name} is in the file and takes the place of the target's: give "
                    "against=<the target's directory> to compare them, or leave it out",
                    fatal=False,
                )
            return
        if entry.dtype not in FLOATS or self.target.tensors[theirs].dtype not in FLOATS:
            return
        if entry.shape != self.target.tensors[theirs].shape or not alike(
            self.head.read(name), self.target.read(theirs)
        ):
            self.add(
                f"{what}-differs",
                f"{name} is not the target's {theirs}: a stale one lowers acceptance without a "
                "word",
            )

    # What all heads share -------------------------------------------------------------------------
    def files(self) -> None:
        self.findings += file_faults(self.head)

    @property
    def prefixed(self) -> list[str]:
        """Tensors whose names begin with model., where a head's do not."""
        return sorted(name for name in self.head.tensors if name.startswith("model."))

    def unprefixed(self) -> None:
        if self.prefixed:
            self.add(
                "model-prefix",
                f"{some(self.prefixed)}: engines put model. before these names themselves; take "
                "it away",
            )

    def plain_weights(self, config: Mapping[str, Any]) -> None:
        """A head is as it was trained, whatever its target is."""
        for key in ("quantization_config", "compression_config"):
            if config.get(key):
                self.add(
                    "quantised-config",
                    f"{key} was inherited from a quantised target: a head's weights are plain; "
                    "remove it",
                )

    def untied(self, config: Mapping[str, Any]) -> None:
        if config.get("tie_word_embeddings"):
            self.add(
                "tied-embeddings",
                "tie_word_embeddings is true, copied from a target: SGLang then ties the head to "
                "the embedding; write false",
                fatal=self.engine.ties_head,
            )

    def against_target(self, config: Mapping[str, Any], *, width: bool = True) -> None:
        """Sizes, RoPE and context, where the target's config is there.

        Args:
            width: has the head the target's own width?
        """
        theirs = self.target_config
        self.findings += rope.faults(config, theirs, self.engine)
        if theirs is None:
            return
        mine, own = config.get("vocab_size"), theirs.get("vocab_size")
        if mine != own:
            self.add(
                "vocabulary-size",
                f"vocab_size is {str(mine)[:40]}, the target's is {str(own)[:40]}: engines fail "
                "at the first id beyond it; write the target's, and what is reduced under "
                "draft_vocab_size",
            )
        if width and config.get("hidden_size") != theirs.get("hidden_size"):
            mine, own = config.get("hidden_size"), theirs.get("hidden_size")
            self.add(
                "width-differs", f"hidden_size is {str(mine)[:40]}, the target's is {str(own)[:40]}"
            )
        room, needed = (
            config.get("max_position_embeddings", 2048),
            theirs.get("max_position_embeddings"),
        )
        if type(room) is int and type(needed) is int and room < needed:
            self.add(
                "positions-short",
                f"max_position_embeddings is {room}, the target's is {needed}: past it SGLang "
                "refuses and others draft nonsense; write the target's",
                fatal=not self.engine.raises_context,
            )

    def activation(self, config: Mapping[str, Any]) -> None:
        if self.engine.only_silu and config.get("hidden_act", "silu") != "silu":
            self.add(
                "activation",
                f"hidden_act is {str(config['hidden_act'])[:40]}: {self.engine} runs only silu in "
                "such a block",
            )


def file_faults(head: Directory) -> list[Finding]:
    """Pickles, and what the files do not hold."""
    found: list[Finding] = []

    def add(name: str, said: str, *, fatal: bool = True) -> None:
        found.append(Finding(name, said, fatal))

    if head.pickled:
        if not head.tensors:
            add("pickled-weights", how_to_convert(head.pickled))
        else:
            add(
                "pickle-beside-safetensors",
                f"{some(head.pickled)} is next to the safetensors: some engines read it first, "
                "and it can run code when read; move it away",
                fatal=set(head.pickled) != {MADE_MAP},
            )
    elif not head.tensors:
        add("weights-missing", "holds no safetensors file")
    if lost := [name for name in head.indexed if name not in head.tensors]:
        add(
            "shard-missing",
            f"{INDEX} promises {some(lost)}, which no file here holds: get the directory again",
        )
    held, indexed = head.tensors, head.indexed
    if wrong := [
        f"{name} in {str(indexed[name])[:80]!r}"
        for name in indexed
        if name in held and indexed[name] != held[name].file.name
    ]:
        add(
            "shard-missing",
            f"{INDEX} looks for {some(wrong)}: needs the name of the file here that holds it",
        )
    return found


def _is_dtype(name: Any) -> bool:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return name == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point)


def alike(a: Tensor, b: Tensor) -> bool:
    """Are they the same but for the rounding of the coarser one's dtype?"""
    rounding = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    a, b = a.detach().to("cpu", torch.float32), b.detach().to("cpu", torch.float32)
    return a.shape == b.shape and bool(
        (a - b).pow(2).mean() <= (rounding / 3) ** 2 * b.pow(2).mean()
    )


def refuse(findings: Iterable[Finding], where: str) -> None:
    """Raise InputError that lists what would not work."""
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise InputError(
            f"{where}: " + "; ".join(f"[{finding.name}] {finding.said}" for finding in fatal)
        )
