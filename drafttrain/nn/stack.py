"""The decoder layers of a causal LM run one by one: some of them, from given hidden states, or with
sub-layers left out.

The model's own modules are called and nothing of it is changed, so that others can use it at the
same time. A layer without its attention or its MLP is a second module around the same parts, which
puts zeros in the place of the part that is left out. The layer's own code then adds them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError, first_line
from drafttrain.flow import PartialPass
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.layers import call

_MLPS = ("mlp", "feed_forward", "ffn")
_FIT = "give a Llama-, Qwen-, Mistral-, Gemma-2- or GPT-NeoX-like target"
_MISFITS = (
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    ValueError,
    RuntimeError,
    AssertionError,
)


@dataclass(frozen=True)
class Step:
    """A decoder layer, complete or with something left out."""

    layer: int
    """Its number, from 0."""
    module: nn.Module


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class LayerInputs:
    """What every layer is given besides the hidden states of some new tokens."""

    cache: KVCache
    """The new tokens follow its committed entries."""
    masks: Any
    """One, or one for each kind of layer, see `CausalLM.masks_and_positions`."""
    positions: Tensor
    """(b s)"""
    rotary: Any
    """Rotary embeddings of the positions."""


class Stack:
    """Everything between a causal LM's tokens and its head.

    Raises: InputError for a family whose layers cannot be run one by one: all of them are compared
    with the model's own pass.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.steps: Steps = tuple(
            Step(number, layer) for number, layer in enumerate(model.decoder_layers)
        )
        self._norm = model.norm_name or ""
        self._check()

    def __len__(self) -> int:
        return len(self.steps)

    # Running --------------------------------------------------------------------------------------
    def embed(self, ids: Tensor) -> Tensor:
        """(b s) int64 -> (b s d), what the first layer reads."""
        out: Tensor = self.model.embedding(ids)
        return out

    def norm(self, hidden: Tensor) -> Tensor:
        """(b s d) residual stream after the last layer -> (b s d) what the head reads."""
        out: Tensor = getattr(self.model.base, self._norm)(hidden)
        return out

    def inputs(
        self,
        hidden: Tensor,
        cache: KVCache,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> LayerInputs:
        """Of the tokens of (b s d) hidden states; the other arguments are those of
        `CausalLM.read`."""
        s = hidden.shape[1]
        masks, positions = self.model.masks_and_positions(s, cache, tree_mask, depths)
        rotary = self.model.base.rotary_emb(hidden, position_ids=positions)
        return LayerInputs(cache, masks, positions, rotary)

    def run(self, hidden: Tensor, inputs: LayerInputs, steps: Sequence[Step]) -> Tensor:
        """(b s d) residual stream before these layers -> after them. Their entries are written into
        the cache."""
        for step in steps:
            hidden = self._call(step, hidden, inputs)
        return hidden

    def finish(
        self,
        ids: Tensor,
        cache: KVCache,
        partial_pass: PartialPass,
        *,
        tree_mask: Tensor,
        depths: Tensor,
        layers: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """End a pass over n tokens whose lower layers have been run for some of them; nothing is
        committed.

        Args:
            ids: (b n) int64; tree_mask: (b|1 n n) bool; depths: (b|1 n) int64, as in
                `CausalLM.read`.
            partial_pass: n of its `places`. Rows may lack different tokens.
            layers: those whose outputs are returned, none below the last one of the partial pass.
        Returns: (b n d) last hidden states, {layer: (b n d)}. All entries are in the order of
        `ids`.
        """
        if layers and min(layers) < partial_pass.layer:
            raise ValueError(
                f"layer {min(layers)} asked for, of a pass that goes on after layer "
                f"{partial_pass.layer}"
            )
        hidden, order = self._lower(ids, cache, partial_pass, tree_mask, depths)
        cache.arrange(order, range(partial_pass.layer + 1))
        inputs = self.inputs(hidden, cache, tree_mask, depths)
        found = {partial_pass.layer: hidden}
        for step in self.steps[partial_pass.layer + 1 :]:
            hidden = self._call(step, hidden, inputs)
            if step.layer in layers:
                found[step.layer] = hidden
        return self.norm(hidden), {layer: found[layer] for layer in layers}

    # Leaving out ----------------------------------------------------------------------------------
    def without(self, attention: Collection[int] = (), mlp: Collection[int] = ()) -> Steps:
        """All layers, without the attention of some and the MLP of some; a layer without both is
        dropped.

        Raises: InputError for a family in which that cannot be done.
        """
        steps = []
        for step in self.steps:
            lacks = (step.layer in attention, step.layer in mlp)
            if all(lacks):
                continue
            steps.append(self._lacking(step, *lacks) if any(lacks) else step)
        return tuple(steps)

    def sizes(self) -> tuple[list[int], list[int]]:
        """Number of parameters of every layer's attention and of its MLP, without norms."""
        parts = [
            [sum(p.numel() for p in getattr(step.module, name).parameters()) for step in self.steps]
            for name in self._names()
        ]
        return parts[0], parts[1]

    # Inside ---------------------------------------------------------------------------------------
    def _call(self, step: Step, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        mask = inputs.masks
        if isinstance(mask, dict):
            mask = mask[self.model.kind_of(step.layer)]
        return call(
            step.module,
            hidden,
            positions=inputs.positions,
            rotary=inputs.rotary,
            mask=mask,
            cache=inputs.cache,
        )

    def _lower(
        self,
        ids: Tensor,
        cache: KVCache,
        partial_pass: PartialPass,
        tree_mask: Tensor,
        depths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the lower layers for the tokens that the partial pass lacks.

        Returns: (b n d) the residual stream after them, of all tokens; (b n) the places of their
        entries in the new ones.
        """
        b, n = ids.shape
        read, missing = partial_pass.hidden.shape[1], partial_pass.places < 0
        late = read + missing.long().cumsum(1) - 1
        order = torch.where(missing, late, partial_pass.places)  # b n
        hidden, most = partial_pass.hidden, int(missing.sum(1).max())
        if most:
            # The missing ones of each row in order. A row that lacks fewer reads others again,
            # whose entries nobody looks at.
            index = missing.long().argsort(dim=1, descending=True, stable=True)[:, :most]  # b m
            wide = index[:, :, None].expand(-1, -1, n)
            sees = tree_mask.expand(b, -1, -1).gather(1, wide)  # b m n
            by_entry = sees.new_zeros(b, most, read + most).scatter(
                2, order[:, None].expand(-1, most, -1), sees
            )
            depth_of = depths.new_zeros(b, read + most).scatter(1, order, depths.expand(b, -1))
            cache.advance(read)
            more = self.embed(ids.gather(1, index))
            inputs = self.inputs(more, cache, by_entry, depth_of)
            more = self.run(more, inputs, self.steps[: partial_pass.layer + 1])
            cache.advance(-read)
            hidden = torch.cat((hidden, more), 1)
        return hidden.gather(1, order[:, :, None].expand(-1, -1, hidden.shape[-1])), order

    def _names(self) -> tuple[str, str]:
        """Names of a layer's attention and of its MLP. The attention is the part that knows its
        number in a cache."""
        parts = dict(self.steps[0].module.named_children())
        attention = [
            name
            for name, part in parts.items()
            if isinstance(getattr(part, "layer_idx", None), int)
        ]
        mlp = [name for name in _MLPS if name in parts]
        if len(attention) != 1 or len(mlp) != 1:
            raise InputError(
                f"{self.model.called} ({self.model.config.model_type}): no attention and MLP were "
                f"found in its layers, which have {', '.join(parts)}; {_FIT}"
            )
        return attention[0], mlp[0]

    def _lacking(self, step: Step, attention: bool, mlp: bool) -> Step:
        names = self._names()
        bare = _around(step.module, {names[0]: _NoAttention(), names[1]: _NoMlp()})
        where: Any = {"device": self.model.device, "dtype": self.model.dtype}
        x = torch.linspace(-1, 1, self.model.width, **where)[None, None]
        try:
            with torch.inference_mode():
                inputs = self.inputs(x, self.model.new_cache(1, 1))
                out = self._call(Step(step.layer, bare), x, inputs)
            assert torch.equal(out, x), "without attention and MLP something else is still done"
        except _MISFITS as error:
            raise InputError(
                f"{self.model.called} ({self.model.config.model_type}): parts of its layers cannot "
                f"be left out ({first_line(error)}); {_FIT}"
            ) from error
        left_out: dict[str, nn.Module] = {}
        if attention:
            left_out[names[0]] = _NoAttention()
        if mlp:
            left_out[names[1]] = _NoMlp()
        return Step(step.layer, _around(step.module, left_out))

    @torch.inference_mode()
    def _check(self) -> None:
        model = self.model
        apart = max(1, model.vocab_size // 7)
        ids = torch.arange(1, 7, device=model.device)[None] * apart % model.vocab_size
        try:
            assert self._norm, "its final norm was not found"
            ours, own = model.new_cache(1, 8), model.new_cache(1, 8)
            gap = size = 0.0
            for part in (ids[:, :4], ids[:, 4:]):
                expected = model.read(part, own).float()
                hidden = self.embed(part)
                found = self.norm(self.run(hidden, self.inputs(hidden, ours), self.steps)).float()
                gap = max(gap, float((found - expected).abs().max()))
                size = max(size, float(expected.abs().max()))
                for cache in (ours, own):
                    cache.commit(torch.tensor([part.shape[1]], device=model.device))
            loose = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.05
            differ = f"the outcome differs by {gap / (size + 1e-9):.2g} of its size"
            assert gap <= loose * size, differ
        except _MISFITS as error:
            raise InputError(
                f"{model.called} ({model.config.model_type}): its decoder layers cannot be run one "
                f"by one ({first_line(error)}); {_FIT}"
            ) from error


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *_args: Any, **_more: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMlp(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _around(layer: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """A layer of the same parts with some replaced. Its parameters are the same tensors; hooks on
    the layer itself are not copied."""
    found = copy.copy(layer)
    found._modules = {**layer._modules, **parts}
    found._forward_hooks = OrderedDict()
    return found
