"""Which engine loads which drafter, and in which layout. A pair that no layout declares is served
by no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.layouts import engines, speculators
from drafttrain.layouts.checking import layout_of
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.layout import Layout, Read, Write, known


@dataclass(frozen=True)
class Pair:
    """An engine, and a layout of a drafter that it loads."""

    engine: Engine
    layout: Layout[Any]
    write: Write[Any]

    @property
    def readings(self) -> Mapping[Engine, Reading]:
        return self.layout.engines()


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


def written() -> tuple[Layout[Any], ...]:
    return tuple(layout for layout in known() if layout.write is not None)


def holding(kind: type[Drafter]) -> list[Layout[Any]]:
    """Layouts in which this drafter is written."""
    return [layout for layout in written() if kind in layout.drafters]


def engines_of(kind: type[Drafter]) -> tuple[Engine, ...]:
    """Those that load this drafter."""
    return tuple(dict.fromkeys(e for layout in holding(kind) for e in layout.engines(kind)))


def targets() -> tuple[str, ...]:
    """What `to` may be: the engines for which something is written."""
    loading = {engine for layout in written() for engine in layout.engines()}
    return tuple(engine.name for engine in engines.KNOWN if engine in loading)


def pair_of(kind: type[Drafter], name: str, settings: Mapping[str, Any]) -> Pair:
    """What writes this drafter for the engine of that name.

    Args:
        settings: the drafter's.
    Raises: InputError for a pair that no engine serves, naming what would.
    """
    engine = engines.named(name)
    if engine is None:
        raise InputError(f"to={name}: give one of {', '.join(targets())}")
    layouts = holding(kind)
    if not layouts:
        why = _UNSERVED.get(kind, f"no engine's layout for it is known here; {_IN_TRANSFORMERS}")
        for key, value in settings.items():
            why = why.replace(f"{{{key}}}", str(value))
        raise InputError(f"to={name}: {kind.__name__} is not exported: {why}")
    for layout in layouts:
        if engine in layout.engines(kind) and layout.write is not None:
            return Pair(engine, layout, layout.write)
    raise InputError(
        f"to={name}: {kind.__name__} is not exported there: "
        f"{engine.holds or f'{name} loads no such drafter'}; give "
        f"to={' or to='.join(engines.names(engines_of(kind)))}"
    )


def reader_of(head: Directory) -> tuple[type[Drafter], Read]:
    """The drafter that a foreign directory becomes, and what reads it.

    Raises: InputError for a head that is no drafter of drafttrain's.
    """
    layout, read = _readable(head)
    return layout.drafter(head), read


def judge(head: Directory) -> None:
    """Raise InputError for a foreign directory that cannot be read, as far as that shows without
    the target."""
    layout, _ = _readable(head)
    layout.judge(head)


def _readable(head: Directory) -> tuple[Layout[Any], Read]:
    layout = layout_of(head)
    readable = [other for other in known() if other.read is not None]
    if layout is speculators.LAYOUT:
        kind = str(head.config.get(speculators.TYPE))
        taken = {name: other for other in readable for name in other.speculators}
        if kind not in taken:
            raise InputError(
                f"{head.path} is a speculators directory of type {kind[:40]}: "
                f"{', '.join(sorted(taken))} are taken over"
            )
        layout = taken[kind]
    if layout.read is None:
        *most, last = sorted(other.what for other in readable)
        raise InputError(
            f"{head.path} has the layout {layout.name}: {', '.join(most)} and {last} are taken over"
        )
    return layout, layout.read
