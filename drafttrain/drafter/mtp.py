"""Multi-token prediction: one module guesses the target's next last hidden state from its own, or
the target's, and the token after it; it is reused at every depth (DeepSeek-V3, arXiv:2412.19437,
section 2.2; trained in several steps on a frozen target as FastMTP is, arXiv:2509.18362).

Alignment, 0-based, for a row x_0..x_{T-1} with features h_i (what the LM head reads); row i stays
row i, step j = 0..J-1:

|                    | step 0                  | step j >= 1                                |
|--------------------|-------------------------|--------------------------------------------|
| hidden in          | h_i                     | z_i of step j-1, after the module's norm   |
| token in           | x_{i+1}                 | x_{i+1+j}, the text's own                  |
| rotary position    | i                       | i + j                                      |
| keys read          | step 0, rows <= i       | those, and row i of the steps 1..j         |
| predicts           | x_{i+2}                 | x_{i+2+j}                                  |
| soft label         | softmax(head(h_{i+1}))  | softmax(head(h_{i+1+j}))                   |
| weight             | m_{i+2}                 | m_{i+2+j} step_decay^j / sum                    |
| rows with a label  | 0..T-3                  | 0..T-3-j                                   |

So row i of step j is what drafting computes for the prefix x_0..x_{i+1} at depth j + 1, where the
drafts are the text's own tokens. FastMTP instead reads the rows <= i of the step itself, at
position i (`attention: same_step`), which drafting never does. The weight is the label's mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer, number, shown, switch
from drafttrain.drafter.borrowing import sizes_of_inputs
from drafttrain.drafter.unrolling import Labels, Unrolls
from drafttrain.errors import InputError, first_line
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.cache import KVCache
from drafttrain.nn.isolation import mask_of
from drafttrain.nn.layers import new_rotary
from drafttrain.nn.mixture import Mixture
from drafttrain.nn.native import NativeModule
from drafttrain.nn.plain import plain_config
from drafttrain.nn.unrolled import MOST_STEPS, Unrolled, at_labels, unroll
from drafttrain.nn.widened import WidenedLayer, norm
from drafttrain.target import native
from drafttrain.target.model import Target

TTT, SAME_STEP = "ttt", "same_step"
SHIPPED, NEW = "shipped", "new"


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Settings of `Mtp`."""

    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""
    steps: int
    """J, how often the module runs over a row in training. Drafting goes to any depth."""
    step_decay: float
    """Step j weighs step_decay^j in the loss, divided by the sum over all steps; FastMTP has
    0.6."""
    attention: str
    """Which keys a later step reads in training: those that drafting reads (`ttt`), or those of its
    own step (`same_step`)."""
    detach: bool
    """Stop gradients between steps, as HASS does; else they flow through all of them."""
    own_head: bool
    """Train a projection to the draft vocabulary, started as the target's rows; false borrows
    these."""
    loss: Mapping[str, float]
    """Weights of losses by name; FastMTP has cross_entropy only."""
    beta: float
    """Of `jsd`."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""
    native: str | None
    """A module of the layout that the target's family is shipped with: `shipped` starts with the
    weights in the target's own files, `new` with random ones. None: see `Mtp`."""

    def __post_init__(self) -> None:
        integer("steps", self.steps, 1, MOST_STEPS)
        integer("chunk", self.chunk, 1)
        for name in ("detach", "own_head"):
            switch(name, getattr(self, name))
        number("step_decay", self.step_decay, above=0)
        if self.step_decay > 1:
            raise InputError(f"step_decay={self.step_decay}: needs a number above 0, at most 1")
        if self.attention not in (TTT, SAME_STEP):
            raise InputError(
                f"attention={shown(self.attention)}: give {TTT}, which is what drafting reads, or "
                f"{SAME_STEP}"
            )
        if self.native not in (None, SHIPPED, NEW):
            raise InputError(f"native={shown(self.native)}: give {SHIPPED}, {NEW} or null")
        Mixture(self.loss, self.beta)

    @property
    def step_weights(self) -> list[float]:
        """(J) of the steps' losses; their sum is 1."""
        raw = [self.step_decay**step for step in range(self.steps)]
        return [value / sum(raw) for value in raw]


class Mtp(Unrolls):
    """The drafter: norms of both inputs, one plain decoder layer whose queries, keys and values
    read both, a final norm, the target's embedding and head borrowed.

    The layer is Llama's in the target's width, heads and rotary settings, whatever the target's
    family is, and the residual stream starts as h. DeepSeek's module multiplies both inputs to the
    width d before a layer of the family. No engine runs that for a target without such heads; this
    one is served as an EAGLE-3 head that captures no states and gives back its normed output
    (vLLM 0.32), and computes exactly the same there.
    """

    Config = MtpConfig
    config: MtpConfig
    needs = Needs(last_hidden=True)
    _rotary: nn.Module

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.mixture = Mixture(self.config.loss, self.config.beta)
        self.native: NativeModule | None = None
        if self.config.native is None:
            self._make_plain()
        else:
            self._make_native()
        self.lm_head: nn.Linear | None = None
        if self.config.own_head:
            rows = self.rows_of_head().float()
            self.lm_head = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(rows.clone())
        self.to(target.device)
        if self.native is not None:
            self._try_native()

    def settings(self) -> dict[str, Any]:
        """Weights that were shipped are those of this drafter from then on: one that is built by
        these settings is given its own."""
        found = super().settings()
        return {**found, "native": NEW if self.native is not None else None}

    def describe(self) -> dict[str, Any]:
        if self.native is None:
            return super().describe()
        family = native.family_of(self.target).name
        return {"module": f"{family}'s own layout, {self.config.native}", **super().describe()}

    def layer_config(self) -> Any:
        """The config that its plain layer is made by."""
        return plain_config(self.target)

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | Unrolled | None = None,
    ) -> Tensor:
        """(b s d) features and (b s) the tokens after them -> (b s d) guesses of the next features,
        which the head and the next step read.

        Args:
            positions: (b|1 s) rotary positions.
            mask: (b 1 s t) bool; None is causal.
        """
        x = features.to(self.dtype)
        embedded = self.target.embed(tokens.to(self.target.device)).to(x.device, self.dtype)
        places = positions.expand(x.shape[0], -1).clamp_max(self.target.context - 1)
        rotary = self._rotary(x, position_ids=places)
        out: Tensor
        if self.native is not None:
            out = self.native(x, embedded, places, rotary, mask, cache)
        else:
            out = self.norm(self.layers[0](x, embedded, rotary, mask, cache))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(... d) its guesses of features -> (... w)."""
        if self.lm_head is None:
            return self.head(hidden)
        return self.target.finish_logits(self.lm_head(hidden.to(self.dtype)))

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        """Rows keep apart by their mask and positions."""

    def unrolled(self, batch: Batch, features: Features) -> list[Tensor]:
        """(b s-2 d) guesses of each step, by the table above. Rows without a label of their own
        hold numbers that nothing is to read."""
        assert features.last_hidden is not None
        hidden, ids = features.last_hidden.to(self.device), batch.input_ids.to(self.device)
        rows = max(ids.shape[1] - 2, 0)
        if not rows:
            return [hidden[:, :0].to(self.dtype)] * self.config.steps
        first = mask_of(batch.packing, rows, self.device)
        hidden = hidden[:, :rows].to(self.dtype)
        if hidden.is_inference() and torch.is_grad_enabled():
            hidden = hidden.clone()  # Such a tensor cannot be kept for the way back.

        def step(
            hidden: Tensor, places: Tensor, positions: Tensor, earlier: Unrolled
        ) -> tuple[Tensor, Tensor]:
            tokens = ids[:, places]
            if self.config.attention == TTT:
                out = self(hidden, tokens, positions, cache=earlier)
            else:
                out = self(hidden, tokens, positions, first)
            return out, out

        return list(
            unroll(
                step,
                hidden,
                batch.positions.to(self.device)[:, :rows],
                self.config.steps,
                first=first,
                detach=self.config.detach,
            )
        )

    def aligned(self, batch: Batch, features: Features) -> tuple[Tensor, Labels]:
        """What the head reads for every label of the table above: (t k d) with grad, a row for
        each step; and the labels."""
        labels = Labels.of(batch, self.config.steps, self.device)
        outs = self.unrolled(batch, features)
        read = [at_labels(out, labels.where, step) for step, out in enumerate(outs)]
        return torch.stack(read, 1), labels

    # Decoding -------------------------------------------------------------------------------------
    def begin(self, features: Features) -> Tensor:
        assert features.last_hidden is not None
        return features.last_hidden

    def run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        out = self(hidden, tokens, positions, mask, cache)
        return out, out

    # Inside ---------------------------------------------------------------------------------------
    def _make_plain(self) -> None:
        config, target = self.layer_config(), self.target
        layer = WidenedLayer(config, 0, qk_norm=False, norm_before_residual=False)
        self.layers = nn.ModuleList([layer])
        self.norm = norm(config, target.width)
        nn.init.constant_(self.norm.weight, sizes_of_inputs(target)[0])
        # No child of this module: its table keeps its precision, and nothing of it is saved.
        object.__setattr__(self, "_rotary", new_rotary(target, plain=True).to(target.device))

    def _make_native(self) -> None:
        target = self.target
        family = native.family_of(target)
        if not hasattr(target.base, "rotary_emb"):
            raise InputError(f"drafter.native: target {target.name} has no rotary positions")
        self.native = NativeModule(
            target, embedding_first=family.embedding_first, blank_first=family.blank_first
        )
        object.__setattr__(self, "_rotary", target.base.rotary_emb)
        if self.config.native == SHIPPED:
            native.load_shipped(target, self.native.state_dict())

    @torch.no_grad()
    def _try_native(self) -> None:
        """Raise InputError if the family's layer cannot be driven row by row."""
        d, device = self.target.width, self.device
        tokens = torch.zeros(1, 3, dtype=torch.int64, device=device)
        features = torch.ones(1, 3, d, device=device).cumsum(-1) / d
        positions = torch.arange(3, device=device)[None]
        why = "its cache is not used"
        try:
            complete = self(features, tokens, positions)
            cache = KVCache(1, 3, device)
            for i in range(3):
                mask = cache.mask(torch.ones(1, 1, 1, dtype=torch.bool, device=device))
                now = slice(i, i + 1)
                out = self(features[:, now], tokens[:, now], positions[:, now], mask, cache)
                cache.commit(torch.ones(1, dtype=torch.int64, device=device))
            same = torch.allclose(out[:, 0], complete[:, 2], rtol=1e-2, atol=1e-2)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            same, why = False, first_line(error)
        if not same:
            raise InputError(
                f"drafter.native: the layer of target {self.target.name} "
                f"({self.target.config.model_type}) cannot be driven: {why}; set "
                "drafter.native=null for a module of another shape"
            )
