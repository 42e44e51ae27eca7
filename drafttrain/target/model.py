"""The frozen target: any decoder-only `transformers` causal LM, with one small interface.

It gives embeddings, the map from the last hidden state to logits, chosen layers' outputs, one
causal pass over training rows, and one cached pass over a token tree with an ancestor mask and
depth positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.flow import Features, Needs, Packing, PartialPass
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.probing import probe
from drafttrain.nn.stack import Stack
from drafttrain.target import fingerprint
from drafttrain.target.lowrank import Adapter


@dataclass(frozen=True)
class Pass:
    """One cached pass over new tokens."""

    hidden: Tensor
    """(b s d) last hidden state of each new token, after the final norm."""
    layers: dict[int, Tensor]
    """{l: (b s d)} outputs of the layers asked for."""
    following: Tensor | None = None
    """(b s) the token chosen after each new one, where that is known without logits."""

    def at(self, places: Tensor) -> Pass:
        """One place of every row. Args: places: (b)."""
        rows = torch.arange(len(places), device=places.device)

        def pick(values: Tensor) -> Tensor:
            return values[rows, places][:, None]

        layers = {layer: pick(values) for layer, values in self.layers.items()}
        following = self.following if self.following is None else pick(self.following)
        return Pass(pick(self.hidden), layers, following)


def outside(token: int, target: Target) -> str:
    """Why an id that a tokenizer gave cannot be read."""
    return (
        f"the tokenizer gives id {token}, the model's vocabulary ends at {target.vocab_size - 1}: "
        "give the tokenizer it was trained with, or a model whose embedding was resized for the "
        "added tokens"
    )


class Target(CausalLM):
    """A frozen causal LM. Not an `nn.Module`, so that a module that holds it does not save, wrap or
    train it."""

    def __init__(self, model: Any, tokenizer: Any | None, name: str) -> None:
        super().__init__(model.eval().requires_grad_(False), f"target {name}")
        self.tokenizer = tokenizer
        self.name = name
        self.adapter: Adapter | None = None
        """The part of its weights that joint training added; None for a target as it was loaded."""
        self.original: Target | None = None
        """The target that it was tuned from."""
        self.made: dict[str, Any] = {}
        """What others made of it, for use as long as it is there."""
        probe(self)
        self._fingerprint: dict[str, str] | None = None

    # Facts ----------------------------------------------------------------------------------------
    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End ids of the generation settings, of the model and of the tokenizer (its end of a
        turn), each once."""
        found: list[int] = []
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            found += ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
        odd = [i for i in found if type(i) is not int]
        if odd:
            raise InputError(
                f"target {self.name}: eos_token_id holds {str(odd[0])[:40]}, needs the ids of "
                "tokens"
            )
        return tuple(dict.fromkeys(found))

    @property
    def fingerprint(self) -> dict[str, str]:
        """{part: text}: recorded in every set, store, checkpoint and package, so that those of
        another target are refused."""
        if self._fingerprint is None and self.original is not None and self.adapter is not None:
            self._fingerprint = {
                **self.original.fingerprint,
                fingerprint.ADAPTER: self.adapter.digest,
            }
        if self._fingerprint is None:
            self._fingerprint = fingerprint.of_target(
                self.model, self.config, self.tokenizer, self.dtype
            )
        return self._fingerprint

    # Parts ----------------------------------------------------------------------------------------
    @cached_property
    def stack(self) -> Stack:
        """Its decoder layers, to be run one by one. Raises: InputError for a family in which that
        cannot be done."""
        return Stack(self)

    def embed(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (... d), rows of the input embedding."""
        return nn.functional.embedding(ids, self.embedding.weight)

    # Passes ---------------------------------------------------------------------------------------
    @torch.inference_mode()
    def features(
        self, input_ids: Tensor, lengths: Tensor, needs: Needs, packing: Packing | None = None
    ) -> Features:
        """One causal pass over training rows padded on the right.

        Args:
            input_ids: (b s) int64.
            lengths: (b) real tokens per row. Padding follows the text, so causal attention never
                reads it.
            packing: where the rows are in sequences that several were joined into; each row has the
                features that it has by itself.
        """
        del lengths
        with self._capture(needs.layers) as layers:
            ids = input_ids.to(self.device)
            hidden = self.full_pass(ids, packing and packing.to(self.device))
        return Features(last_hidden=hidden if needs.last_hidden else None, layers=dict(layers))

    def hidden(self, input_ids: Tensor) -> Tensor:
        """(b s) int64 -> (b s d), the last hidden state of the same pass, differentiable where
        gradients are on."""
        return self.full_pass(input_ids.to(self.device))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> KVCache:
        """An empty cache for texts that start with these prompts, one a row.

        Args:
            capacity: tokens that a row may come to hold.
        """
        return self.new_cache(len(prompts), capacity)

    def choices(self, out: Pass) -> Tensor:
        """(b s) the most likely token after each of a pass; -1 where the logits leave none to
        choose, since they are not finite."""
        values, tokens = self.head(out.hidden).max(-1)
        return tokens.masked_fill(~values.isfinite(), -1)

    @torch.inference_mode()
    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
        partial_pass: PartialPass | None = None,
    ) -> Pass:
        """Read s new tokens after the committed ones; nothing is committed.

        Args:
            ids: (b s) int64.
            tree_mask: (b|1 s s) bool, which new tokens each new token sees; None means causal
                order.
            depths: (b|1 s) int64, position of each new token relative to the row's length; None
                means 0, 1, 2...
            layers: decoder layers whose outputs are returned.
            partial_pass: the part of this pass that drafting has already run; it goes on from
                there. Needs `tree_mask` and `depths`.
        """
        if partial_pass is not None:
            assert tree_mask is not None and depths is not None
            return Pass(
                *self.stack.finish(
                    ids, cache, partial_pass, tree_mask=tree_mask, depths=depths, layers=layers
                )
            )
        with self._capture(layers) as outputs:
            hidden = self.read(ids, cache, tree_mask=tree_mask, depths=depths)
        return Pass(hidden=hidden, layers=dict(outputs))

    # Inside ---------------------------------------------------------------------------------------
    @contextmanager
    def _capture(self, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Hooks on the chosen layers only; all hidden states are never held."""
        outputs: dict[int, Tensor] = {}
        handles = []
        for layer in layers:
            if not 0 <= layer < len(self.decoder_layers):
                raise InputError(
                    f"layer {layer} asked for; target {self.name} has layers "
                    f"0..{len(self.decoder_layers) - 1}"
                )

            def hook(_module: nn.Module, _args: Any, output: Any, layer: int = layer) -> None:
                outputs[layer] = output[0] if isinstance(output, tuple) else output

            handles.append(self.decoder_layers[layer].register_forward_hook(hook))
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()
