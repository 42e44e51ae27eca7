"""Attention among rows that were joined into one sequence: every token reads its own row alone, itself and what stands before it.

A dense mask serves any backend that takes one. It costs the products of the whole sequence, of which most are thrown away; where an
accelerator is at hand, `flex_attention` skips blocks of tokens that have no row in common (PyTorch's, by a `BlockMask`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafttrain.errors import InputError, first_line
from drafttrain.flow import Packing

if TYPE_CHECKING:
    from drafttrain.nn.causal import CausalLM

DENSE, FLEX = "dense", "flex"
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, head, reading place, place read) -> bool, each (): what `flex_attention` asks of a mask."""


def rule(packing: Packing, window: int | None = None) -> Rule:
    """Which place may be read from which, place by place.

    Args:
        window: tokens that a sliding layer reads at most, the reading one included; None is all.
    """
    documents = packing.document_ids

    def sees(sequence: Tensor, _head: Tensor, reading: Tensor, read: Tensor) -> Tensor:
        seen = (documents[sequence, reading] == documents[sequence, read]) & (read <= reading)
        return seen if window is None else seen & (reading - read < window)

    return sees


def dense(packing: Packing, first: int | None = None, window: int | None = None) -> Tensor:
    """(b 1 s s) bool, the same for all places at once, true = may be read; padding reads padding.

    Args:
        first: the first so many places alone; None is all.
    """
    documents = packing.document_ids[:, :first]
    s = documents.shape[1]
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    if window is not None:
        mask &= torch.ones(s, s, dtype=torch.bool, device=documents.device).triu(1 - window)
    return mask[:, None]


def mask_of(packing: Packing | None, first: int, device: torch.device) -> Tensor | None:
    """`dense` on a device for the first so many places; None, which is causal, where every sequence is one row."""
    return None if packing is None else dense(packing.to(device), first)


def blocks(packing: Packing, window: int | None = None) -> Any:
    """The same as a `BlockMask`, one for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, s = packing.document_ids.shape
    return create_block_mask(rule(packing, window), b, None, s, s, device=packing.document_ids.device)


@contextlib.contextmanager
def told(model: CausalLM, packing: Packing) -> Iterator[dict[str, Any]]:
    """What a model's pass over joined rows is given: masks in its backend's form, and positions that begin anew in every row.

    `flex_attention` takes the place of the model's backend where the model is said to use it and no gradient is asked for.
    """
    flex = model.isolates_by == FLEX and not torch.is_grad_enabled()

    def made(window: int | None) -> Any:
        return blocks(packing, window) if flex else model.as_attention(dense(packing, window=window))

    kinds = {model.kind_of(layer): window for layer, window in enumerate(model.windows)}
    masks = {kind: made(window) for kind, window in kinds.items()}
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    with _flex(model) if flex else contextlib.nullcontext():
        yield {"attention_mask": mask, "position_ids": packing.position_ids.clamp_max(model.context - 1)}


@contextlib.contextmanager
def _flex(model: CausalLM) -> Iterator[None]:
    """Every part of a model reads its backend's name from its config, and parts may have configs of their own."""
    found = {id(part.config): part.config for part in model.model.modules() if hasattr(part, "config")}
    before = [(config, config._attn_implementation) for config in found.values()]
    try:
        for config, _ in before:
            config._attn_implementation = "flex_attention"
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


@torch.no_grad()
def choose(model: CausalLM) -> str:
    """Find out, by trying, how a model keeps joined rows apart, and let it do so from now on. Returns "dense" or "flex".

    `flex_attention` is taken on an accelerator whose compiler can build it, for a model with PyTorch's attention.

    Raises: InputError for a model in which joined rows do not give what they give alone, such as one that counts positions by
        itself, or one whose layers carry something on from token to token.
    """
    ids = torch.arange(1, 13, device=model.device) * max(1, model.vocab_size // 13) % model.vocab_size
    first, second = ids[:5], ids[5:]
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1]], device=model.device)
    positions = torch.tensor([[*range(5), *range(7), 0]], device=model.device)
    packing, joined = Packing(documents, positions), torch.cat((ids, ids[:1]))[None]
    alone = torch.cat([model.whole(row[None])[0] for row in (first, second)]).float()
    loose = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    why = ""
    accelerated = model.device.type not in ("cpu", "mps") and model.attention == "sdpa"
    for way in (FLEX, DENSE) if accelerated else (DENSE,):
        model.isolates_by = way
        try:
            found = model.whole(joined, packing)[0, :12].float()
            gap = float((found - alone).abs().max() / (alone.abs().max() + 1e-9))
            if gap <= loose:
                return way
            why = f"features differ by {gap:.2g} of their size from those of the rows alone"
        except Exception as error:  # A family's own code, or a compiler's.
            why = first_line(error)
    model.isolates_by = DENSE
    raise InputError(
        f"trainer.pack: {model.called} ({model.config.model_type}) cannot keep rows apart in one sequence ({why}): set "
        "trainer.pack=null"
    )
