"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840) and 3.1 (arXiv:2605.09992): a decoder layer reads the
outputs of several layers of the target, and learns by training-time test.

Alignment, 0-based, for a row x_0..x_{T-1} with g_i = fc of the target's layers at place i:

| row i, step | input                          | position | soft label | predicts  | weight    |
| 0           | [E(x_{i+1}); g_i]              | i        | p_{i+1}    | x_{i+2}   | m_{i+2}   |
| j = 1..J-1  | [E(x_{i+1+j}); own step j - 1] | i + j    | p_{i+1+j}  | x_{i+2+j} | m_{i+2+j} |

`drafttrain.nn.unrolled` has the table of keys. The loss of step j weighs step_decay^j; gradients go
through all steps. The sum is divided by the labels of step 0, which reaches every label.

Departs from the source: the weight is the *label's* mask, where the public code has m_{i+j}, so
that the first draft of every answer is trained; places whose most likely token is outside the draft
vocabulary are learned too, by the distribution over the rest; the final norm and an own head start
as the target's. A head of its own is a plain product, as engines compute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer, number, shown, switch
from drafttrain.drafter.borrowing import SLACK
from drafttrain.drafter.unrolling import Labels, Unrolls
from drafttrain.errors import InputError, first_line
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.cache import KVCache
from drafttrain.nn.isolation import mask_of
from drafttrain.nn.mixture import Mixture
from drafttrain.nn.plain import plain_config, plain_rotary
from drafttrain.nn.unrolled import MOST_STEPS, Unrolled, at_labels, unroll
from drafttrain.nn.widened import ByToken, WidenedLayer, norm
from drafttrain.target.model import Target

MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Settings of `Eagle3`."""

    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""
    taps: Sequence[int] | None
    """Numbers, from 0 and rising, of the target's layers whose outputs are read; None: see
    `default_taps`."""
    layers: int
    """Decoder layers of the drafter."""
    mlp: int
    """Width inside their MLPs; 0 is as in the target."""
    heads: int
    """Of their attention; 0 is the target's number."""
    kv_heads: int
    """0 is the target's number, or `heads` where these are given."""
    rotary: Mapping[str, Any] | None
    """RoPE by the keys of transformers' `rope_parameters`, such as {rope_theta: 10000.0}; None is
    the target's."""
    qk_norm: bool
    """Normalise the queries and keys of every head."""
    own_head: bool
    """Train a projection to the vocabulary; false borrows the target's, frozen."""
    fc_norm: bool
    """A norm for each layer read, before they are put together (EAGLE-3.1)."""
    norm_before_fc: bool
    """One norm for all of them, in place of `fc_norm`."""
    norm_output: bool
    """What the next step reads has been through the final norm (EAGLE-3.1)."""
    norm_before_residual: bool
    """The residual stream starts after its norm."""
    steps: int
    """J."""
    step_decay: float
    """Step j, from 0, weighs step_decay^j; the source has 0.8."""
    loss: Mapping[str, float]
    """Weights of losses by name; the source has soft_cross_entropy only."""
    beta: float
    """Of `jsd`."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""

    def __post_init__(self) -> None:
        _check_taps(self.taps)
        integer("layers", self.layers, 1, MOST_LAYERS)
        for name in ("mlp", "heads", "kv_heads"):
            integer(name, getattr(self, name))
        _check_rotary(self.rotary)
        flags = ("qk_norm", "own_head", "fc_norm", "norm_before_fc", "norm_output")
        for name in (*flags, "norm_before_residual"):
            switch(name, getattr(self, name))
        if self.fc_norm and self.norm_before_fc:
            raise InputError("fc_norm and norm_before_fc are both true: give one of them")
        integer("steps", self.steps, 1, MOST_STEPS)
        number("step_decay", self.step_decay, above=0)
        if self.step_decay > 1:
            raise InputError(f"step_decay={self.step_decay}: needs a number above 0, at most 1")
        integer("chunk", self.chunk, 1)
        Mixture(self.loss, self.beta)

    @property
    def step_weights(self) -> list[float]:
        """(J) of the steps' losses."""
        return [self.step_decay**step for step in range(self.steps)]


def _check_taps(taps: object) -> None:
    if taps is None:
        return
    whole = isinstance(taps, Sequence) and not isinstance(taps, str) and taps
    if not whole or not all(type(tap) is int and tap >= 0 for tap in taps):  # type: ignore[attr-defined]
        raise InputError(
            f"taps={shown(taps)}: needs numbers of layers, from 0, such as [1,14,26], or null"
        )
    assert isinstance(taps, Sequence)
    if list(taps) != sorted(set(taps)):
        # Engines put the layers together by rising number, whatever the order of a list.
        raise InputError(f"taps={shown(taps)}: needs every layer once, by rising number")


def _check_rotary(given: object) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise InputError(f"rotary={shown(given)}: needs a mapping with rope_theta, or null")
    number("rotary.rope_theta", given.get("rope_theta"), above=0)


def _turning(config: Any) -> nn.Module:
    """Its rotary embeddings. Raises: InputError for settings that are none."""
    try:
        return plain_rotary(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"rotary={shown(dict(config.rope_parameters))}: transformers makes no RoPE of it "
            f"({first_line(error)})"
        ) from error


def default_taps(layers: int) -> tuple[int, ...]:
    """The public code's for a target of that many layers: 1, L/2 - 1, L - 4. These are three from 7
    layers on; of fewer layers it is the first, a middle one and the last but one."""
    if layers >= 7:
        return 1, layers // 2 - 1, layers - 4
    last = max(layers - 2, 0)
    return tuple(sorted({0, last // 2, last}))


class Eagle3(Unrolls):
    """The drafter: `fc` of the taps, widened layers, a final norm, a head; the target's embedding
    borrowed. Layers are plain, dense ones (Llama's) in the target's width, heads and rotary
    settings, as engines build them.

    Raises: InputError for layers that the target does not have, and heads that do not fit.
    """

    Config = Eagle3Config
    config: Eagle3Config
    _rotary: nn.Module

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        given = self.config
        self.taps = self._taps()
        """Layers of the target that are read, rising."""
        self.mixture = Mixture(given.loss, given.beta)
        self.needs = Needs(last_hidden=self.mixture.reads_target_probs, layers=self.taps)
        config = self.layer_config()
        d, count = target.width, len(self.taps)
        self.fc_norm: nn.ModuleList | None = None
        self.input_norm: nn.Module | None = None
        if given.fc_norm:
            self.fc_norm = nn.ModuleList(norm(config, d) for _ in self.taps)
        if given.norm_before_fc:
            self.input_norm = norm(config, count * d)
        self.fc = nn.Linear(count * d, d, bias=False)
        flags = {"qk_norm": given.qk_norm, "norm_before_residual": given.norm_before_residual}
        self.layers = nn.ModuleList(
            WidenedLayer(config, layer, **flags) for layer in range(given.layers)
        )
        self.norm = norm(config, d)
        self._start_norm()
        self.lm_head: nn.Linear | None = None
        if given.own_head:
            self.lm_head = self._own_head()
        # No child of this module: its table keeps its precision, and nothing of it is saved.
        object.__setattr__(self, "_rotary", _turning(config))
        self.to(target.device)

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        layers, mlp = settings["layers"], settings["mlp"]
        needed = layers * target.width * (target.width + 3 * mlp)  # at least
        if type(layers) is int and needed > weights + SLACK:
            raise InputError(
                f"layers={layers}, mlp={mlp} need at least {needed:,} weights, the package holds "
                f"{weights:,}"
            )

    def layer_config(self) -> Any:
        """The config that its layers are made by: a plain one's."""
        given, config = self.config, plain_config(self.target, self.config.layers)
        heads = given.heads or config.num_attention_heads
        kv_heads = given.kv_heads or (heads if given.heads else config.num_key_value_heads)
        if heads % kv_heads:
            raise InputError(
                f"heads={heads}, kv_heads={kv_heads}: the heads must be a multiple of the "
                "key/value heads"
            )
        config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
        config.intermediate_size = given.mlp or config.intermediate_size
        if given.rotary is not None:
            config.rope_parameters = {"rope_type": "default", **given.rotary}
        return config

    def describe(self) -> dict[str, Any]:
        count = len(self.target.decoder_layers)
        read = ", ".join(map(str, self.taps))
        return {"reads": f"the outputs of layers {read} of {count}", **super().describe()}

    # Its parts ------------------------------------------------------------------------------------
    def fuse(self, layers: Mapping[int, Tensor]) -> Tensor:
        """{l: (b s d)} outputs of the target's layers -> (b s d), what the first step reads."""
        read = [layers[tap].to(self.device, self.dtype) for tap in self.taps]
        if torch.is_grad_enabled():
            # Tensors of inference mode cannot be kept for the way back.
            read = [value.clone() if value.is_inference() else value for value in read]
        if self.fc_norm is not None:
            read = [one(value) for one, value in zip(self.fc_norm, read, strict=True)]
        joined = torch.cat(read, -1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        out: Tensor = self.fc(joined)
        return out

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | Unrolled | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            hidden: (b s d) of `fuse`, or what the step before returned for the next one.
            tokens: (b s) the tokens after them.
            positions: (b|1 s) rotary positions.
            mask: (b 1 s t) bool; None is causal.
        Returns: (b s d) what the head reads, (b s d) what the next step reads.
        """
        hidden = hidden.to(self.dtype)
        return self._run(hidden, self._embedded(tokens, hidden), positions, mask, cache)

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.target.embed(tokens.to(self.target.device)).to(like)

    def _run(
        self,
        x: Tensor,
        embedded: Tensor | ByToken,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | Unrolled | None,
    ) -> tuple[Tensor, Tensor]:
        positions = positions.expand(x.shape[0], -1).clamp_max(self.target.context - 1)
        rotary = self._rotary(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, embedded, rotary, mask, cache)
        out = self.norm(x)
        return out, out if self.config.norm_output else x

    @property
    def _first(self) -> WidenedLayer:
        first = self.layers[0]
        assert isinstance(first, WidenedLayer)
        return first

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        """Rows keep apart by their mask and positions; a label that another row's step reaches does
        not count for it."""

    def aligned(self, batch: Batch, features: Features) -> tuple[Tensor, Labels]:
        """What the head reads for every label of the table above: (t k d) with grad, a row for
        each step; and the labels."""
        device, count = self.device, self.config.steps
        ids, labels = batch.input_ids.to(device), Labels.of(batch, count, device)
        rows = max(ids.shape[1] - 2, 0)
        hidden = self.fuse({tap: features.layers[tap][:, :rows] for tap in self.taps})
        positions = batch.positions.to(device)[:, :rows]
        steps = [hidden] * count
        if rows:
            by_token = self._first.by_token(self._embedded(ids, hidden))

            def step(
                hidden: Tensor, tokens: Tensor, positions: Tensor, cache: Unrolled
            ) -> tuple[Tensor, Tensor]:
                return self._run(hidden, by_token.at(tokens), positions, None, cache)

            first = mask_of(batch.packing, rows, device)
            steps = list(unroll(step, hidden, positions, count, first=first))
        read = [at_labels(out, labels.where, step) for step, out in enumerate(steps)]
        return torch.stack(read, 1), labels

    # Decoding -------------------------------------------------------------------------------------
    def begin(self, features: Features) -> Tensor:
        return self.fuse(features.layers)

    def run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self(hidden, tokens, positions, mask, cache)
        return out

    # Inside ---------------------------------------------------------------------------------------
    def _taps(self) -> tuple[int, ...]:
        count = len(self.target.decoder_layers)
        if self.config.taps is None:
            return default_taps(count)
        if self.config.taps[-1] >= count:
            raise InputError(
                f"taps={shown(list(self.config.taps))}: needs numbers of layers of target "
                f"{self.target.name}, from 0 to {count - 1}"
            )
        return tuple(self.config.taps)

    def _start_norm(self) -> None:
        """The final norm starts with the target's weights, which its head was learned with."""
        target = self.target
        own = getattr(target.base, target.norm_name or "", None)
        if own is None or getattr(own, "bias", None) is not None:
            return
        with torch.no_grad():
            # As the family applies them: some add 1.
            ones = torch.ones(1, 1, target.width, dtype=torch.float32, device=target.device)
            weights = own(ones.to(target.dtype)).float().flatten()
            self.norm.weight.copy_(weights)

    def _own_head(self) -> nn.Linear:
        rows = self.rows_of_head().float()
        small = torch.tensor(1e-6, dtype=torch.float64)
        scale = float(self.target.finish_logits(small) / small)  # of the target's logits
        made = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
        made.weight = nn.Parameter((rows * scale).clone())
        return made
