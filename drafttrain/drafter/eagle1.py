"""EAGLE-1 (Li et al. 2024, arXiv:2401.15077): one decoder layer guesses the target's next feature
from [f_(t-1); E(x_t)].

Alignment, 0-based, for a row x_0..x_{T-1} with features h_i (what the LM head reads):

| row i  | input             | position | regression | soft label             | predicts | weight  |
| 0..T-3 | [h_i; E(x_{i+1})] | i        | to h_{i+1} | softmax(head(h_{i+1})) | x_{i+2}  | m_{i+2} |

The weight is the *label's* mask, so that the first draft of every answer is trained; the reference
weighs row i by m_i. While decoding, row i is also the first drafting step of a prefix of i + 2
tokens; deeper steps put the drafter's own output in the place of h.

HASS (Zhang et al. 2024, arXiv:2408.15766) is `steps` above 1: these deeper steps are learned too,
all alike, by the table of `drafttrain.nn.unrolled`. The loss is divided by the labels of the first
step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer, number, switch
from drafttrain.drafter.borrowing import BorrowsHead, best_ids, sizes_of_inputs
from drafttrain.drafter.growing import Recurrent
from drafttrain.drafter.unrolling import Labels, accuracies, accuracy_names, guesses_of
from drafttrain.errors import InputError, first_line
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.nn.attention import as_attention
from drafttrain.nn.cache import KVCache
from drafttrain.nn.chunks import Judged
from drafttrain.nn.isolation import mask_of
from drafttrain.nn.layers import call, keys_and_values, layer_config, new_layers, new_rotary
from drafttrain.nn.mixture import Term, Terms, against, is_best, mixed_rows, teacher_goal
from drafttrain.nn.plain import why_plain
from drafttrain.nn.unrolled import MOST_STEPS, AtOnce, Unrolled, at_labels, unroll
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates


@dataclass(frozen=True, kw_only=True)
class Eagle1Config:
    """Settings of `Eagle1`."""

    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""
    bias: bool
    """Give `fc` a bias (inference engines disagree on it)."""
    regression: float
    """Weight of smooth L1 on features; the paper has 1.0."""
    classification: float
    """Weight of the loss over the vocabulary; the paper has 0.1."""
    divergence: str
    """The loss over the vocabulary; the paper's is soft_cross_entropy."""
    noise: float
    """Half width of uniform noise on input features while training; the paper has 0.1."""
    noise_scaled: bool
    """Scale the noise by 512 / row length, as the public code does."""
    balance_input: bool
    """Start `fc` so that both halves of its input weigh the same (embeddings are often much smaller
    than features); the network is the same, only its start differs."""
    steps: int
    """Times that the layer is run over a row, each but the first fed with its own output before."""
    detach: bool
    """No gradient goes from a step to the output that it reads."""
    backward_each_step: bool
    """Make the gradient of each step when its loss is there."""
    topk_weight: float
    """Of one more loss over the target's `topk` most likely tokens."""
    topk: int
    """How many; the paper of HASS has 10."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""

    def __post_init__(self) -> None:
        for name in ("regression", "classification", "noise", "topk_weight"):
            number(name, getattr(self, name))
        if self.regression + self.classification == 0:
            raise InputError(
                "regression and classification are both 0: give one of them a weight above 0"
            )
        for name in ("bias", "noise_scaled", "balance_input", "detach", "backward_each_step"):
            switch(name, getattr(self, name))
        if self.backward_each_step and not self.detach:
            raise InputError(
                "backward_each_step=true with detach=false: the gradient of a step would need all "
                "steps before it, set one of them the other way"
            )
        for name in ("chunk", "topk"):
            integer(name, getattr(self, name), 1)
        integer("steps", self.steps, 1, MOST_STEPS)
        losses.divergence(self.divergence)


class Eagle1(BorrowsHead, Recurrent):
    """The drafter: `fc` (2d -> d), one decoder layer, the target's embedding and head borrowed.

    The layer has no norm before its attention and none after it (arXiv:2401.15077, section 3.2 and
    public code). It is one of the target's family. Where that holds experts or cannot be driven
    like this, it is Llama's (`plain`). Its shape and rotary settings are the target's own.
    Attention is full, also where the target's own layer slides.
    """

    Config = Eagle1Config
    config: Eagle1Config
    needs = Needs(last_hidden=True)
    _rotary: nn.Module

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self._divergence = losses.divergence(self.config.divergence)
        d = target.width
        self.fc = nn.Linear(2 * d, d, bias=self.config.bias)
        self.plain = why_plain(target)
        """Why the layer is not of the target's family; nothing where it is."""
        self._make_layer()
        if self.config.balance_input:
            self._balance()

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(b s d) features and (b s) the tokens after them -> (b s d) guesses of the next
        features.

        Args:
            positions: (b|1 s) rotary positions.
            mask: (b 1 s t) bool; None is causal.
        """
        x, positions, rotary = self._inputs(features, tokens, positions)
        if mask is not None or self.target.attention != "sdpa":
            if mask is None:
                mask = torch.ones(
                    1, 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
                ).tril()
            mask = as_attention(mask, self.target.attention, self.dtype)
        return call(self.layer, x, positions=positions, rotary=rotary, mask=mask, cache=cache)

    def _inputs(
        self, features: Tensor, tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Of the layer: (b s d), (b s) positions, and what it turns by."""
        embedded = self.target.embed(tokens.to(self.target.device)).to(features.device, self.dtype)
        x = self.fc(torch.cat((features.to(self.dtype), embedded), -1))
        positions = positions.expand(x.shape[0], -1).clamp_max(self.target.context - 1)
        turned = self._rotary if self.plain else self.target.base.rotary_emb
        return x, positions, turned(x, position_ids=positions)

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        """Rows keep apart by their mask and positions."""

    def _aligned(
        self, batch: Batch, features: Features, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows of the table above that have a label.

        Args:
            generator: of noise on the inputs; None adds none.
        Returns: (t d) guesses of features, (t d) the target's own, (t) int64 labels, (b s) bool
            where these labels are.
        """
        hidden = features.last_hidden
        assert hidden is not None
        device = self.device
        hidden, ids = hidden.to(device), batch.input_ids.to(device)
        where = batch.labels(2).to(device)  # b s, the label x_{i+2} has its own mask
        if hidden.shape[1] < 3:  # no row reaches a label
            nothing = hidden.new_zeros(0, hidden.shape[-1])
            out = self.fc(torch.cat((nothing, nothing), -1).to(self.dtype))
            return out, nothing, ids.new_zeros(0), where
        chosen = where[:, 2:]  # b s-2
        inputs = hidden[:, :-2].to(self.dtype)
        if generator is not None and self.config.noise:
            inputs = inputs + self._noise(inputs, batch, generator)
        positions = batch.positions.to(device)[:, :-2]
        mask = mask_of(batch.packing, inputs.shape[1], device)
        out = self(inputs, ids[:, 1:-1], positions, mask)[chosen]
        return out, hidden[:, 1:-1][chosen], ids[:, 2:][chosen], where

    def _noise(self, inputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """(b s d) uniform numbers."""
        device = inputs.device
        width = inputs.new_full((len(inputs), 1, 1), self.config.noise)
        if self.config.noise_scaled:
            lengths = batch.lengths_at().to(device)[:, : inputs.shape[1], None]
            width = width * (512 / lengths.to(inputs.dtype))
        noise = torch.rand(
            inputs.shape, generator=generator, dtype=torch.float32, device=generator.device
        )
        return (noise.to(inputs) * 2 - 1) * width

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        if self._is_hass:
            return self._hass(batch, features, generator)
        out, teacher, labels, where = self._aligned(batch, features, generator)
        count = where.sum().float()
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        total = out.new_zeros(())
        if self.config.regression:
            value = losses.smooth_l1(out, teacher).sum()
            total = total + self.config.regression * value
            parts["regression"] = (value.detach(), count)
        if self.config.classification:
            value, choices = losses.over_vocabulary(
                out, teacher, self.head, self._divergence, chunk=self.config.chunk
            )
            total = total + self.config.classification * value
            parts["classification"] = (value.detach(), count)
            # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
            parts["accuracy"] = ((self.to_target_ids(choices) == labels).sum().float(), count)
        return Loss(total.float(), count, parts)

    @property
    def loss_parts(self) -> tuple[str, ...]:
        by_feature = ("regression",) * (self.config.regression > 0)
        if self._is_hass:
            accuracies_too = accuracy_names(self.config.steps) if self._terms else ()
            return (*by_feature, *self._terms, *accuracies_too)
        return by_feature + ("classification", "accuracy") * (self.config.classification > 0)

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        if self.config.steps > 1:
            labels = Labels.of(batch, self.config.steps, self.device)
            read = [
                at_labels(out, labels.where, step)
                for step, out in enumerate(self._steps(batch, features, None))
            ]
            stacked = torch.stack(read, 1)
            return guesses_of(self, stacked, labels, self.head, self.config.chunk, batch)
        out, _, _, where = self._aligned(batch, features)
        found = torch.full_like(batch.input_ids.to(where.device), -1)
        found[where] = best_ids(self, out, self.head, self.config.chunk)
        return found[:, :, None]

    # Several steps (HASS) -------------------------------------------------------------------------
    @property
    def _is_hass(self) -> bool:
        return self.config.steps > 1 or self.config.topk_weight > 0

    @property
    def _terms(self) -> Terms:
        """The losses over the vocabulary."""
        given = self.config
        terms: dict[str, tuple[float, Term]] = {}
        if given.classification:
            terms["classification"] = (given.classification, against(self._divergence))
        if given.topk_weight:
            top = functools.partial(losses.top_cross_entropy, k=given.topk)
            terms["topk"] = (given.topk_weight, against(top))
        return terms

    def _steps(
        self, batch: Batch, features: Features, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """(b r d) guesses of features by each step, see `unroll`."""
        assert features.last_hidden is not None
        given, device, ids = self.config, self.device, batch.input_ids.to(self.device)
        rows = max(ids.shape[1] - 2, 0)
        inputs = features.last_hidden.to(device)[:, :rows].to(self.dtype)
        if not rows:
            yield from (self.fc(torch.cat((inputs, inputs), -1)) for _ in range(given.steps))
            return
        if generator is not None and given.noise:
            inputs = inputs + self._noise(inputs, batch, generator)

        def step(
            hidden: Tensor, tokens: Tensor, positions: Tensor, cache: Unrolled
        ) -> tuple[Tensor, Tensor]:
            mask = cache.mask(rows, device)
            out = self(hidden, ids[:, tokens], positions, mask, cache)
            return out, out

        def recall(hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            x, _, rotary = self._inputs(hidden, ids[:, tokens], positions)
            return keys_and_values(self.layer, x, rotary)

        yield from unroll(
            step,
            inputs,
            batch.positions.to(device)[:, :rows],
            given.steps,
            first=mask_of(batch.packing, rows, device),
            detach=given.detach,
            recall=recall if given.backward_each_step else None,
        )

    def _hass(self, batch: Batch, features: Features, generator: torch.Generator | None) -> Loss:
        assert features.last_hidden is not None
        labels = Labels.of(batch, self.config.steps, self.device)
        teacher = labels.before(features.last_hidden, self.device)
        steps = (
            at_labels(out, labels.where, step)
            for step, out in enumerate(self._steps(batch, features, generator))
        )
        if self.config.backward_each_step:
            each, found = AtOnce(list(self.parameters())), []
            for step, read in enumerate(steps):
                one = self._judged(read[:, None], labels.valid[:, step, None], labels, teacher)
                each.add(one.total)
                found.append(one)
            total = each.total()
            sums = torch.stack([one.sums[0] for one in found]).sum(0)
            hits = torch.cat([one.noted for one in found], 1)
        else:
            all_steps = self._judged(torch.stack(list(steps), 1), labels.valid, labels, teacher)
            total, sums, hits = all_steps.total, all_steps.sums.sum(0), all_steps.noted
        count = labels.valid.sum().float()
        names = (name for name in self.loss_parts if not name.startswith("accuracy"))
        parts = {name: (value, count) for name, value in zip(names, sums.unbind(), strict=True)}
        if self._terms:
            parts |= accuracies(hits, labels)
        return Loss(total.float(), labels.valid[:, 0].sum().float(), parts)

    def _judged(self, read: Tensor, valid: Tensor, labels: Labels, teacher: Tensor) -> Judged:
        """Losses of some steps.

        Args:
            read: (t k d) of these steps; valid: (t k); teacher: (t d) the target's own features.
        """
        made = Judged(read.sum() * 0.0, read.new_zeros(read.shape[1], 0), valid.long())
        if self._terms:
            made = mixed_rows(
                read,
                self.to_draft_ids(labels.ids),
                self.head,
                self._terms,
                goal=teacher_goal(teacher, self.head),
                note=is_best,
                weights=valid.float(),
                valid=valid,
                chunk=self.config.chunk,
            )
        if not self.config.regression:
            return made
        gaps = losses.smooth_l1(read, teacher[:, None].expand_as(read)) * valid  # t k
        total = made.total + self.config.regression * gaps.sum()
        return Judged(total, torch.cat((gaps.detach().sum(0)[:, None], made.sums), 1), made.noted)

    # Decoding -------------------------------------------------------------------------------------
    def begin(self, features: Features) -> Tensor:
        assert features.last_hidden is not None
        return features.last_hidden

    def run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        out = self(hidden, tokens, positions, mask, cache)
        return out, out

    def after(self, out: Tensor) -> Candidates:
        return self.candidates(self.head(out))

    # Inside ---------------------------------------------------------------------------------------
    def _make_layer(self) -> None:
        """Of the target's family if that can be driven, else a plain one."""
        if not self.plain:
            self.layer = new_layers(self.target, input_norm=False)[0]
            self.to(self.target.device)
            if not (fault := self._fault()):
                return
            self.plain = f"the target's own layer cannot be driven ({fault})"
        self.layer = new_layers(self.target, input_norm=False, plain=True)[0]
        # No child of this module: its table keeps its precision, and nothing of it is saved.
        object.__setattr__(self, "_rotary", new_rotary(self.target, plain=True))
        self.to(self.target.device)
        if fault := self._fault():
            raise InputError(
                f"eagle1 cannot be built from target {self.target.name} "
                f"({self.target.config.model_type}): {fault}"
            )

    def _fault(self) -> str:
        """Why the layer cannot be driven; nothing if it can."""
        try:
            with torch.no_grad():
                self._compare_with_its_cache()
        except (TypeError, AttributeError, AssertionError, RuntimeError) as error:
            return first_line(error)
        return ""

    def layer_config(self) -> Any:
        """The config that its layer is made by: the target's own, or a plain one's."""
        return layer_config(self.target, plain=True) if self.plain else self.target.config

    def describe(self) -> dict[str, Any]:
        found = super().describe()
        return {"layer": f"plain and dense ({self.plain})", **found} if self.plain else found

    def _compare_with_its_cache(self) -> None:
        d, device = self.target.width, self.device
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        features = torch.randn(1, 2, d, device=device)
        positions = torch.arange(2, device=device)[None]
        plain = self(features, tokens, positions)
        cache = KVCache(1, 2, device)
        for i in range(2):
            mask = cache.mask(torch.ones(1, 1, 1, dtype=torch.bool, device=device))
            now = slice(i, i + 1)
            out = self(features[:, now], tokens[:, now], positions[:, now], mask, cache)
            cache.commit(torch.ones(1, dtype=torch.int64, device=device))
        close = torch.allclose(out[:, 0], plain[:, 1], rtol=1e-3, atol=1e-3)
        assert close, "its cache is not used"

    def _balance(self) -> None:
        d = self.target.width
        feature, embedding = sizes_of_inputs(self.target)
        with torch.no_grad():
            self.fc.weight[:, :d] /= feature
            self.fc.weight[:, d:] /= embedding
