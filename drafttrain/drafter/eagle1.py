"""EAGLE-1 (Li et al. 2024, arXiv:2401.15077): one decoder layer guesses the target's next feature
from [f_(t-1); E(x_t)].

Alignment, 0-based, for a row x_0..x_{T-1} with features h_i (what the LM head reads):

| row i    | input               | position | regression target | soft label        | predicts | weight    |
| 0..T-3   | [h_i; E(x_{i+1})]   | i        | h_{i+1}           | softmax(head(h_{i+1})) | x_{i+2}  | m_{i+2}   |

The weight is the *label's* mask, so that the first draft of every answer is trained; the reference
weighs row i by m_i. While decoding, row i is also the first drafting step of a prefix of i + 2
tokens; deeper steps put the drafter's own output in the place of h.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer, number, switch
from drafttrain.drafter.base import Autoregressive, AutoregressiveState, Committed
from drafttrain.drafter.borrowing import BorrowsHead, sizes_of_inputs
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.nn.attention import as_attention
from drafttrain.nn.cache import KVCache
from drafttrain.nn.isolation import mask_of
from drafttrain.target.model import Target


class Eagle1(BorrowsHead, Autoregressive):
    """The drafter: `fc` (2d -> d), one decoder layer of the target's family, the target's embedding
    and head borrowed.

    The layer has no norm before its attention and none behind it (arXiv:2401.15077, section 3.2 and
    public code). Its shape and rotary settings are the target's own. Attention is full, also where
    the target's own layer slides.

    Args:
        target: the frozen model.
        draft_ids: (w) ascending ids that can be proposed; None is the whole vocabulary.
        bias: give `fc` a bias (inference engines disagree on it, hence off).
        regression, classification: weights of smooth L1 on features and of the loss over the
            vocabulary; the paper has 1.0 and 0.1.
        divergence: the loss over the vocabulary; the paper's is soft_cross_entropy.
        noise: half width of uniform noise on input features while training; the paper has 0.1.
        noise_scaled: scale the noise by 512 / row length, as the public code does.
        balance_input: start `fc` so that both halves of its input weigh the same (embeddings are
            often much smaller than features); the network is the same, only its start differs.
        chunk: positions whose logits exist at one time in the loss.
    """

    needs = Needs(last_hidden=True)

    def __init__(
        self,
        target: Target,
        *,
        draft_ids: Tensor | list[int] | None = None,
        bias: bool = False,
        regression: float = 1.0,
        classification: float = 0.1,
        divergence: str = "soft_cross_entropy",
        noise: float = 0.1,
        noise_scaled: bool = False,
        balance_input: bool = False,
        chunk: int = 1024,
    ) -> None:
        super().__init__(target, draft_ids)
        for name, weight in (
            ("regression", regression),
            ("classification", classification),
            ("noise", noise),
        ):
            number(name, weight)
        if regression + classification == 0:
            raise InputError(
                "regression and classification are both 0: give one of them a weight above 0"
            )
        for name, given in (
            ("bias", bias),
            ("noise_scaled", noise_scaled),
            ("balance_input", balance_input),
        ):
            switch(name, given)
        integer("chunk", chunk, 1)
        self.bias, self.regression, self.classification = bias, regression, classification
        self.divergence, self.noise, self.noise_scaled, self.balance_input = (
            divergence,
            noise,
            noise_scaled,
            balance_input,
        )
        self.chunk = chunk
        self._divergence = losses.divergence(divergence)
        d = target.width
        self.fc = nn.Linear(2 * d, d, bias=bias)
        self.layer: Any = _decoder_layer(target)
        words = inspect.signature(type(self.layer).forward).parameters
        self._cache_word = next(
            (word for word in ("cache", "past_key_values", "layer_past") if word in words), "cache"
        )
        self.to(target.device)
        self._probe()
        if balance_input:
            self._balance()

    # Parts ----------------------------------------------------------------------------------------
    def settings(self) -> dict[str, Any]:
        names = (
            "bias",
            "regression",
            "classification",
            "divergence",
            "noise",
            "noise_scaled",
            "balance_input",
            "chunk",
        )
        return {name: getattr(self, name) for name in names} | {
            "draft_ids": None if self.draft_ids is None else self.draft_ids.tolist()
        }

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(b s d) features and (b s) the tokens behind them -> (b s d) guesses of the next
        features.

        Args:
            positions: (b|1 s) rotary positions.
            mask: (b 1 s t) bool; None is causal.
        """
        embedded = self.target.embed(tokens.to(self.target.device)).to(features.device, self.dtype)
        x = self.fc(torch.cat((features.to(self.dtype), embedded), -1))
        if mask is not None or self.target.attention != "sdpa":
            if mask is None:
                mask = torch.ones(
                    1, 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
                ).tril()
            mask = as_attention(mask, self.target.attention, self.dtype)
        positions = positions.expand(x.shape[0], -1)
        out = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.target.base.rotary_emb(x, position_ids=positions),
            use_cache=cache is not None,
            **{self._cache_word: cache},
        )
        return out[0] if isinstance(out, tuple) else out

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        pass

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        hidden = features.last_hidden
        assert hidden is not None
        device = self.fc.weight.device
        hidden, ids = hidden.to(device), batch.input_ids.to(device)
        chosen = batch.labels(2)[:, 2:].to(device)  # b s-2, weight of row i is the mask of x_{i+2}
        count = chosen.sum().float()
        if hidden.shape[1] < 3:
            # No row reaches a label. Every parameter still takes part, so that no process waits for
            # a gradient.
            none = {name: (count * 0.0, count) for name in self.loss_parts}
            return Loss(
                torch.stack([p.sum() for p in self.parameters()]).sum().float() * 0.0, count, none
            )
        inputs = hidden[:, :-2].to(self.dtype)
        if generator is not None and self.noise:
            width = torch.full((len(ids), 1, 1), self.noise, device=device, dtype=self.dtype)
            if self.noise_scaled:
                width = width * (
                    512 / batch.lengths_at().to(device)[:, : inputs.shape[1], None].to(self.dtype)
                )
            noise = torch.rand(
                inputs.shape, generator=generator, dtype=torch.float32, device=generator.device
            )
            inputs = inputs + (noise.to(inputs) * 2 - 1) * width
        positions = batch.positions.to(device)[:, :-2]
        out = self(
            inputs, ids[:, 1:-1], positions, mask_of(batch.packing, inputs.shape[1], device)
        )[chosen]  # t d
        teacher = hidden[:, 1:-1][chosen]  # t d
        labels = ids[:, 2:][chosen]  # t
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        total = out.sum() * 0.0
        if self.regression:
            value = losses.smooth_l1(out, teacher).sum()
            total = total + self.regression * value
            parts["regression"] = (value.detach(), count)
        if self.classification:
            value, choices = losses.over_vocabulary(
                out, teacher, self.head, self._divergence, chunk=self.chunk
            )
            total = total + self.classification * value
            parts["classification"] = (value.detach(), count)
            # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
            parts["accuracy"] = ((self.to_target_ids(choices) == labels).sum().float(), count)
        return Loss(total.float(), count, parts)

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return ("regression",) * (self.regression > 0) + ("classification", "accuracy") * (
            self.classification > 0
        )

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        assert features.last_hidden is not None
        device = self.fc.weight.device
        ids = batch.input_ids.to(device)
        if ids.shape[1] < 3:
            return torch.full_like(ids, -1)[:, :, None]
        positions = torch.arange(ids.shape[1] - 2, device=device)[None]
        out = self(features.last_hidden.to(device)[:, :-2], ids[:, 1:-1], positions)
        chosen = batch.loss_mask[:, 2:].to(device)
        found = torch.full_like(ids, -1)
        parts = [self.head(part).argmax(-1) for part in out[chosen].split(self.chunk)]
        if parts:
            found[:, 2:][chosen] = self.to_target_ids(torch.cat(parts))
        return found[:, :, None]

    # Decoding -------------------------------------------------------------------------------------
    def extend(self, state: AutoregressiveState, committed: Committed) -> tuple[Tensor, Tensor]:
        cache, s = state.cache, committed.tokens.shape[1]
        assert committed.features.last_hidden is not None
        device = committed.tokens.device
        tree_mask = torch.ones(1, s, s, dtype=torch.bool, device=device).tril()
        positions = cache.lengths[:, None] + torch.arange(s, device=device)
        out = self(
            committed.features.last_hidden,
            committed.tokens,
            positions,
            cache.mask(tree_mask),
            cache,
        )
        cache.commit(committed.counts)
        last = out[torch.arange(len(out), device=device), committed.counts - 1]  # b d
        return last, self.head(last)

    def expand(
        self,
        state: AutoregressiveState,
        tokens: Tensor,
        hidden: Tensor,
        depth: int,
        tree_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        cache, m = state.cache, tokens.shape[1]
        true_rows = cache.lengths - (tree_mask.shape[-1] - m)
        positions = (true_rows + depth - 1)[:, None].expand(-1, m)
        out = self(hidden, tokens, positions, cache.mask(tree_mask), cache)
        cache.advance(m)
        return out, self.head(out)

    # Inside ---------------------------------------------------------------------------------------
    def _probe(self) -> None:
        """A family whose layer cannot be driven like this is refused before anything is trained."""
        try:
            with torch.no_grad():
                d, device = self.target.width, self.fc.weight.device
                tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
                features, positions = (
                    torch.randn(1, 2, d, device=device),
                    torch.arange(2, device=device)[None],
                )
                plain = self(features, tokens, positions)
                cache = KVCache(1, 2, device)
                for i in range(2):
                    one = cache.mask(torch.ones(1, 1, 1, dtype=torch.bool, device=device))
                    out = self(
                        features[:, i : i + 1],
                        tokens[:, i : i + 1],
                        positions[:, i : i + 1],
                        one,
                        cache,
                    )
                    cache.commit(torch.ones(1, dtype=torch.int64, device=device))
                assert torch.allclose(out[:, 0], plain[:, 1], rtol=1e-3, atol=1e-3), (
                    "its cache is not used"
                )
        except (TypeError, AttributeError, AssertionError, RuntimeError) as error:
            raise InputError(
                f"eagle1 cannot be built from target {self.target.name} "
                f"({self.target.config.model_type}): its decoder "
                f"layer is not a rotary one with an input norm ({error}); give a Llama-, Qwen-, "
                f"Mistral-, Gemma-2- or "
                "GPT-NeoX-like target"
            ) from error

    def _balance(self) -> None:
        d = self.target.width
        feature, embedding = sizes_of_inputs(self.target)
        with torch.no_grad():
            self.fc.weight[:, :d] /= feature
            self.fc.weight[:, d:] /= embedding


def _decoder_layer(target: Target) -> nn.Module:
    """One layer of the target's family and shape, newly initialised, without the norm before its
    attention."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    config._attn_implementation = target.attention
    kind: Any = type(target.decoder_layers[0])
    layer = kind(config, 0)
    if not hasattr(layer, "input_layernorm") or not hasattr(target.base, "rotary_emb"):
        raise InputError(
            f"eagle1 needs a target with rotary positions and a norm before attention; "
            f"{target.name} "
            f"({target.config.model_type}) has another layer"
        )
    layer.input_layernorm = nn.Identity()
    return layer
