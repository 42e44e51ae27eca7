"""Which engine loads which drafter, and in which layout. A pair that is not here is served by no
engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.layouts import eagle1, language_model, medusa, speculators
from drafttrain.layouts.checking import layout_of
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.writing import Exported, Source
from drafttrain.target.model import Target

Writer = Callable[[Source], Exported]
Reader = Callable[[Directory, Target, dict[str, Any]], Drafter]

LAYOUTS: dict[type[Drafter], ModuleType] = {Eagle1: eagle1, Medusa: medusa, Ssm: language_model}
"""Of each drafter that an engine loads; ENGINES of a layout are those that do."""

TARGETS = ("vllm", "sglang", "eagle", "medusa", "speculators", "hf")
"""What `to` may be."""

_IN_TRANSFORMERS = (
    "its package decodes in transformers as it is: model.generate(..., custom_generate=<package>)"
)
_UNSERVED: dict[type[Drafter], str] = {  # with the drafter's own settings in braces
    HydraHeads: f"no engine runs Hydra's sequential heads; {_IN_TRANSFORMERS}",
    NGram: (
        "it has no weights, and engines copy from the text by themselves: vllm serve <target> "
        "--speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": {max_ngram}, '
        '"prompt_lookup_min": {min_ngram}}\', '
        "or in transformers model.generate(..., prompt_lookup_num_tokens=4, "
        "max_matching_ngram_size={max_ngram})"
    ),
    Suffix: (
        "it has no weights, and vLLM has suffix decoding of its own (with arctic-inference "
        "installed): vllm serve <target> "
        '--speculative-config \'{"method": "suffix"}\'; ' + _IN_TRANSFORMERS
    ),
}


def writer_of(kind: type[Drafter], engine: str, settings: Mapping[str, Any]) -> Writer:
    """What writes this drafter for that engine.

    Args:
        settings: the drafter's.
    Raises: InputError for a pair that no engine serves, naming what would.
    """
    if engine not in TARGETS:
        raise InputError(f"to={engine}: give one of {', '.join(TARGETS)}")
    layout = LAYOUTS.get(kind)
    if layout is None:
        why = _UNSERVED.get(kind, f"no engine's layout for it is known here; {_IN_TRANSFORMERS}")
        for name, value in settings.items():
            why = why.replace(f"{{{name}}}", str(value))
        raise InputError(f"to={engine}: {kind.__name__} is not exported: {why}")
    if engine not in layout.ENGINES:
        what = (
            "engines load EAGLE-3, P-EAGLE, DFlash and DSpark from speculators' layout, not this"
            if engine == "speculators"
            else f"{engine} loads no such drafter"
        )
        raise InputError(
            f"to={engine}: {kind.__name__} is not exported there: {what}; give "
            f"to={' or to='.join(layout.ENGINES)}"
        )
    write: Writer = layout.write
    return write


_FROM_SPECULATORS: dict[str, type[Drafter]] = {"eagle": Eagle1, "medusa": Medusa}


def reader_of(head: Directory) -> tuple[type[Drafter], Reader]:
    """The drafter that a foreign directory becomes, and what reads it.

    Raises: InputError for a head that is no drafter of drafttrain's.
    """
    layout = layout_of(head)
    if layout is speculators:
        told = str(head.config.get(speculators.TYPE))
        if told not in _FROM_SPECULATORS:
            raise InputError(
                f"{head.path} is a speculators directory of type {told[:40]}: "
                f"{', '.join(_FROM_SPECULATORS)} are taken over"
            )
        layout = LAYOUTS[_FROM_SPECULATORS[told]]
    for kind, known in LAYOUTS.items():
        if known is layout:
            read: Reader = known.read
            return kind, read
    name = layout.__name__.rpartition(".")[2]
    raise InputError(
        f"{head.path} has the layout {name}: EAGLE-1 heads, Medusa heads and draft models are "
        f"taken over"
    )
