"""A model tried as it will be used, before anything is built on it: two rows of unlike length in
one batch, a tree of drafts, a single step, past every window that its configuration names.

The measure is the model's own pass over each text by itself. A family that computes something else
in any of these ways (alibi made from a mask, windows counted over entries of a cache, a table of
positions that depends on the length read) would write other text in silence, so it is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import InputError, first_line, refused_by_system
from drafttrain.nn import finite
from drafttrain.nn.attention import computed_by
from drafttrain.nn.causal import CausalLM

_SHORT, _MORE, _DRAFTS = 5, 6, 3
"""Tokens of the longer row where no window is to be passed, those that a window is passed by, and
those of each of the tree's two branches."""
_LOOKED_AT = 12
"""Last positions of each text whose logits are compared: a head over all of them could fill the
memory."""
_REACH = re.compile(r"(window(_size)?|chunk_size|local_attention)$")
"""Names in a configuration of how far back some layers read."""
_READ = ("sliding_window",)
"""Those of them that masks are made by, see `CausalLM.windows`."""
_WORK = {"cpu": 3e11}
"""Multiply-adds that a trial may take by kind of device: a few seconds."""
_MUCH_WORK = 1e14
"""On any other device."""
_TRIED = "the text that it is tried with"


def probe(model: CausalLM) -> None:
    """Raise InputError, with what is known of the cause, unless the model gives its own logits in
    every way in which it will be used.

    A window that is too long to be passed within a few seconds is not tried: a sliding one is taken
    as its configuration describes it, any other is refused.
    """
    _check_rotary(model)
    lengths = _lengths(model)
    if fault := _fault(model, lengths):
        raise InputError(
            f"{_named(model)} cannot be represented: {fault}; {_way_out(model, lengths)}"
        )


def reaches(model: CausalLM) -> dict[str, int]:
    """Windows that the configuration names and the context can exceed, by name."""
    found = {
        name: value
        for name, value in model.config.to_dict().items()
        if type(value) is int and _REACH.search(name) and name not in _READ
    }
    slides = [window for window in model.windows if window is not None]
    if slides:
        found["sliding_window"] = max(slides)
    return {name: value for name, value in found.items() if 1 < value < model.context}


def _lengths(model: CausalLM) -> tuple[int, int]:
    """Tokens of the two rows before the drafts. Raises InputError for a window that is neither
    understood nor short enough to be tried."""
    body = sum(p.numel() for p in model.model.parameters()) - model.embedding.weight.numel()
    work = _WORK.get(model.device.type, _MUCH_WORK)
    depth = model.width * len(model.decoder_layers)
    longest = 0
    for name, value in reaches(model).items():
        if 6 * (value + _MORE) * (body + value * depth) <= work:
            longest = max(longest, value)
        elif name not in _READ:
            raise InputError(
                f"{_named(model)} cannot be used: its config has {name}={value}, a kind of "
                "attention that is not known here and takes too long to be tried"
            )
    n = max(_SHORT, longest + _MORE)
    n = max(2, min(n, model.context - _DRAFTS - 1))
    return n, max(1, n // 2)


def _fault(model: CausalLM, lengths: tuple[int, int]) -> str:
    """What is wrong in words, nothing if all is well."""
    doing, gaps = "its own pass over a text fails", dict[str, list[Tensor]]()
    try:
        with torch.inference_mode():
            ids, ends = _texts(model, *lengths)
            own = [_own(model, ids[row : row + 1, :end]) for row, end in enumerate(ends)]
            for row, logits in enumerate(own):
                if not bool(finite.usable(logits).all()):
                    raise finite.fault_of(model, _origin(model, ids[row:], ends[row:]), _TRIED)
            doing = "its code fails where each token is given a mask and a position"
            for what, found, expected in _trial(model, ids, lengths, own):
                if not bool(finite.usable(found).all()):
                    if (origin := _origin(model, ids, ends)) or finite.spoilt_weights(model):
                        raise finite.fault_of(model, origin, _TRIED)
                    return f"it gives NaN or infinite logits in {what}"
                # A token may be ruled out by -inf, in both alike.
                gap = torch.where(found == expected, 0, found - expected).abs().amax(-1)
                gaps.setdefault(what, []).append(gap)
    except Exception as error:  # A family's own code.
        if isinstance(error, InputError) or refused_by_system(error):
            raise
        return f"{doing} ({first_line(error)})"
    size = max(float(logits[logits.isfinite()].abs().max()) for logits in own) + 1e-6
    exact = model.dtype in (torch.float32, torch.float64)
    for what, some in gaps.items():
        every = torch.cat(some) / size
        # In low precision a router may choose other experts in single places.
        gap, loose = (every.max(), 1e-3) if exact else (every.median(), 0.15)
        if not gap <= loose:
            return f"logits in {what} differ from its own by {gap:.2g} of their size"
    return ""


def _origin(model: CausalLM, ids: Tensor, ends: Sequence[int]) -> finite.Origin | None:
    """What is not finite in the first row, up to its end, in which anything is."""
    texts = (row[:end].tolist() for row, end in zip(ids, ends, strict=True))
    found = (finite.trace(model, text, every=True) for text in texts)
    return next((origin for origin in found if origin), None)


def _texts(model: CausalLM, n: int, m: int) -> tuple[Tensor, list[int]]:
    """(2 s) ids, and how many of each row are looked at: those before the drafts, one branch, one
    more."""
    s, apart = n + _DRAFTS + 1, max(1, round(model.vocab_size * 0.618))
    # From all over the vocabulary: the first ids are often control tokens, whose huge activations
    # magnify rounding.
    ids = torch.arange(1, 2 * s + 1, device=model.device) * apart % model.vocab_size
    return ids.view(2, s), [n + _DRAFTS + 1, m + _DRAFTS + 1]


def _trial(
    model: CausalLM, ids: Tensor, before: tuple[int, int], own: list[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What was done, logits (k v) of some positions, and the model's own of the same ones.

    Args:
        ids: (2 s), before: of each row how many tokens precede the drafts; own: see `_own`.
    """
    device = model.device
    lengths = torch.tensor(before, device=device)
    ends = (lengths + _DRAFTS + 1).tolist()
    hidden = model.full_pass(ids)
    for row, end in enumerate(ends):
        what = "a batch with a longer row" if row else "a pass without a cache"
        yield what, model.head(hidden[row, end - len(own[row]) : end]).float(), own[row]

    cache = model.new_cache(2, before[0] + 2 * _DRAFTS + 1)
    rows = torch.arange(2, device=device)[:, None]
    hidden = model.read(ids[:, : before[0]], cache)
    for row, end in enumerate(before):
        first = ends[row] - len(own[row])
        what = f"a cached pass over {'a row next to a longer one' if row else 'a text'}"
        if first < end:
            yield what, model.head(hidden[row, first:end]).float(), own[row][: end - first]
    cache.commit(lengths)

    # The drafts twice, as two branches of a tree: positions and mask must keep them apart.
    places = lengths[:, None] + torch.arange(_DRAFTS, device=device)
    branch = torch.ones(_DRAFTS, _DRAFTS, dtype=torch.bool, device=device).tril()
    hidden = model.read(
        ids[rows, places].repeat(1, 2),
        cache,
        tree_mask=torch.block_diag(branch, branch).bool()[None],
        depths=torch.arange(_DRAFTS, device=device).repeat(2)[None],
    )
    for row in range(2):
        expected = own[row][-_DRAFTS - 1 : -1].repeat(2, 1)
        yield "a cached pass over a tree", model.head(hidden[row]).float(), expected
    cache.commit(torch.full((2,), _DRAFTS, device=device))
    hidden = model.read(ids[rows, lengths[:, None] + _DRAFTS], cache)
    for row in range(2):
        yield "a step over one token", model.head(hidden[row]).float(), own[row][-1:]


def _own(model: CausalLM, ids: Tensor) -> Tensor:
    """(1 s) -> (k v) what the model itself says after the last k tokens."""
    kept = min(ids.shape[1], _LOOKED_AT)
    words: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(type(model.model).forward).parameters:
        words["logits_to_keep"] = kept
    logits: Tensor = model.model(input_ids=ids, use_cache=False, **words).logits
    return logits[0, -kept:].float()


def _way_out(model: CausalLM, lengths: tuple[int, int]) -> str:
    """What is known of the cause of a fault, and what to do, as far as that can be found out."""
    known = [
        f"its config has {name}={value}, which is not known here"
        for name, value in reaches(model).items()
        if name not in _READ
    ]
    if "position_ids" not in inspect.signature(type(model.base).forward).parameters:
        known.append("its code takes no positions and counts them itself")
    backend = model.attention
    if backend != "eager":
        try:
            model.attention = "eager"
            with computed_by(model.model, "eager"), contextlib.suppress(InputError):
                if not _fault(model, lengths):
                    return f"with attention={backend}, not with eager: set attention=eager"
        finally:
            model.attention = backend
    return "; ".join([*known, "it is not supported"])


def _check_rotary(model: CausalLM) -> None:
    """Refuse a table of positions that changes within the context."""
    rotary = getattr(model.base, "rotary_emb", None)
    if rotary is None:
        return
    few = torch.arange(3, device=model.device)
    all_at_once = torch.cat((few, few.new_tensor([model.context - 1])))
    x = torch.zeros(1, 1, model.width, dtype=model.dtype, device=model.device)
    kinds: list[tuple[Any, ...]] = [()]
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        kinds = [(kind,) for kind in sorted(set(model.config.layer_types))]
    for kind in kinds:
        same = True
        # A module of another make is not understood here; what it does is seen in the passes.
        with torch.no_grad(), contextlib.suppress(TypeError, IndexError, RuntimeError):
            # The last one restores what a longer one may have left there.
            short, long, _ = (
                _parts(rotary(x, places[None], *kind)) for places in (few, all_at_once, few)
            )
            same = all(map(torch.equal, short, [part[:, :3] for part in long]))
        if not same:
            if finite.spoilt_weights(model):  # NaN equals nothing.
                raise finite.fault(model, few.tolist(), _TRIED)
            raise InputError(
                f"{_named(model)} cannot be represented: its rotary table depends on the length of "
                f"the text read, within its context of {model.context}, so that a longer row of a "
                "batch would change a shorter one's text"
            )


def _parts(table: Any) -> tuple[Tensor, ...]:
    return tuple(table) if isinstance(table, (tuple, list)) else (table,)


def _named(model: CausalLM) -> str:
    return f"{model.called} ({type(model.model).__name__})"
