"""The drafter of Medusa heads from elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.inspection import Inspection, alike, refuse
from drafttrain.layouts.medusa.facts import PLAIN, READINGS, bare, counts, held
from drafttrain.packaging.checking import some
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

log = logging.getLogger(__name__)


def read(head: Directory, target: Target, known: dict[str, Any]) -> Medusa:
    """The drafter of foreign heads, in either engine's names. Heads whose projections are the
    target's rows borrow them.

    Args:
        known: settings of the drafter that an export of drafttrain's has; ids of a reduced
            vocabulary in them are those of heads that borrow, where the layout has no place for
            them.
    Raises: InputError.
    """
    names = {bare(name): name for name in head.tensors}
    sizes_held = held(names)
    if sizes_held is None:
        raise InputError(
            f"{head.path} holds no Medusa blocks: blocks.0.layers.0.weight or 0.0.linear.weight"
        )
    _check_counts(head, names)
    count, blocks = sizes_held
    plain = any(PLAIN.fullmatch(name) for name in names)
    width = target.width
    ids, order = _ids(head, target)
    rows = target.vocab_size if ids is None else len(ids)
    named, state = {"token_map", *vocabulary.MAPS}, {}
    for j in range(count):
        for i in range(blocks):
            block = f"{j}.{i}.linear" if plain else f"blocks.{j}.layers.{i}"
            named |= {f"{block}.weight", f"{block}.bias"}
            state[f"heads.{j}.{i}.linear.weight"] = head.weight(
                names.get(f"{block}.weight", f"{block}.weight"), (width, width)
            )
            bias = names.get(f"{block}.bias")
            state[f"heads.{j}.{i}.linear.bias"] = (
                torch.zeros(width) if bias is None else head.weight(bias, (width,))
            )
    projecting, there = _heads(head, names, count, blocks, plain)
    odd = sorted(names.keys() - named - there)
    if odd:
        raise InputError(
            f"{head.path} holds {some(odd)}, which no Medusa head of {count} heads with {blocks} "
            "blocks has"
        )
    projections = [head.weight(name, (rows, width))[order] for name in projecting]
    borrowed = all(alike(head.read(name)[order], _rows(target, ids)) for name in projecting)
    own = known.get("own_head", not borrowed)
    if own and not projecting:
        raise InputError(f"{head.path} holds no projections, but its drafter has some of its own")
    if not own and not borrowed:
        raise InputError(
            f"{head.path} holds projections that are not the target's, but its drafter borrows the "
            "target's"
        )
    kept = known.get("draft_ids") if ids is None and not own else ids
    sizes = {"heads": count, "blocks": blocks, "own_head": own, "draft_ids": kept}
    drafter = with_defaults(Medusa, target, **{**known, **sizes})
    if own:
        every = projections * (count if len(projections) == 1 else 1)
        state |= {f"projections.{j}": weight for j, weight in enumerate(every)}
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def _check_counts(head: Directory, names: dict[str, str]) -> None:
    """Raise InputError for what `export check=` calls an error in the numbers of heads and blocks;
    what it warns of is said."""
    engine = engines.MEDUSA if "medusa_num_heads" in head.config else engines.VLLM
    inspection = Inspection(head, engine, READINGS[engine])
    counts(inspection, names)
    refuse(inspection.findings, str(head.path))
    for finding in inspection.findings:
        log.warning("%s: [%s] %s", head.path, finding.name, finding.said)


def _ids(head: Directory, target: Target) -> tuple[Tensor | None, Tensor]:
    """(w) ids of a token map, or of speculators' d2t, ascending, and (w) the order in which a
    head's rows are taken for them."""
    if "token_map" in head.tensors:
        ids = vocabulary.read_ids(
            f"{head.path}: token_map", head.read("token_map"), target.vocab_size
        )
    elif "d2t" in head.tensors and len(head.tensors["d2t"].shape) == 1:
        offsets = head.read("d2t")
        ids = vocabulary.read_ids(
            f"{head.path}: d2t", vocabulary.ids_of(offsets), target.vocab_size
        )
    else:
        return None, torch.arange(target.vocab_size)
    return ids.sort().values, ids.argsort()


def _heads(
    head: Directory, names: dict[str, str], count: int, blocks: int, plain: bool
) -> tuple[list[str], set[str]]:
    """Names in the file of each head's projection, none where all borrow the target's; and these
    names without a prefix."""
    every = [f"{j}.{blocks}.weight" if plain else f"lm_heads.{j}.weight" for j in range(count)]
    there = [name for name in (*every, "lm_head.weight") if name in names]
    if "lm_head.weight" in there or (head.config.get("original_lm_head") and there):
        shared = "lm_head.weight" if "lm_head.weight" in there else there[0]
        return [names[shared]], set(there)
    if there and len(there) < count:
        raise InputError(f"{head.path} has projections for {len(there)} of {count} heads")
    return [names[name] for name in there], set(there)


def _rows(target: Target, ids: Tensor | None) -> Tensor:
    weight: Tensor = target.output.weight
    return weight if ids is None else weight[ids.to(weight.device)]
