"""A small causal LM as drafter (the SSM of SpecInfer, Miao et al. 2023, arXiv:2305.09781; the draft
model of Leviathan et al. 2023), trained by distillation (DistillSpec, Zhou et al. 2024,
arXiv:2310.08461).

Alignment, 0-based, for a row x_0..x_{T-1} with the target's features h_i (what its LM head reads):

| row i  | reads    | position | soft label          | predicts | weight    |
| 0..T-2 | x_0..x_i | i        | softmax(head(h_i))  | x_{i+1}  | m_{i+1}   |

The weight is the label's mask. While decoding, the same rows are read into a cache of its own:
those of committed tokens stay, and each round reads again what was accepted, the anchor last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer
from drafttrain.drafter import networks, origins
from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import BorrowsHead, best_ids
from drafttrain.drafter.growing import Autoregressive, AutoregressiveState
from drafttrain.drafter.lending import lent_tensors
from drafttrain.drafter.on_policy import OnPolicy, write_answers
from drafttrain.drafter.standalone import Standalone
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Packing
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.mixture import TEXT, Mixture, mixed
from drafttrain.nn.probing import probe
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates


class Network(CausalLM):
    """The drafter's own, some parts of which may be the target's."""

    @property
    def device(self) -> torch.device:
        return next(p.device for p in self.decoder_layers.parameters())

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.decoder_layers.parameters())


@dataclass
class SsmState(AutoregressiveState):
    """The cache, and which drafts of this round are in it."""

    depths: list[int] = field(default_factory=list)
    """Of the drafted nodes read this round, in the order of their entries in the cache; 0 is the
    anchor's children."""


@dataclass(frozen=True)
class _Rows:
    """Rows to learn from."""

    ids: Tensor
    """(b s)"""
    mask: Tensor
    """(b s) bool, the labels."""
    teacher: Tensor | None
    """(b s d) the target's features, where its distribution is needed."""
    by_target: bool
    """Did the target write these rows? Only then are they text to learn by heart."""
    weights: Tensor | None
    """(b s) of the labels, where they do not count alike."""
    packing: Packing | None = None
    """Where rows are that were joined into sequences."""


@dataclass(frozen=True)
class _Aligned:
    """The rows of the table above that have a label."""

    hidden: Tensor
    """(t d) what the head reads."""
    labels: Tensor
    """(t) int64"""
    by_target: Tensor
    """(t) bool, see `_Rows`; so are the others."""
    teacher: Tensor | None
    """(t d)"""
    weights: Tensor | None
    """(t)"""


@dataclass(frozen=True, kw_only=True)
class SsmConfig:
    """Settings of `Ssm`. Its origin is one of three, and `config` is what a package keeps of the
    last:

    - `layers=[0, 1, 14, 29]`: these layers of the target, copied; embedding, final norm and head
      are the target's, frozen and never saved, but for those in `own`, which are copied and
      trained.
    - `layers=4`: new in the target's family, with random weights, in the sizes given.
    - `path`: a directory of `transformers`.
    """

    layers: int | Sequence[int] | None
    """Numbers of the target's layers, or how many new ones."""
    path: str | None
    """A directory; once it is read, `config` takes its place."""
    config: Mapping[str, Any] | None
    """Of `transformers`, as a package keeps it."""
    own: Sequence[str]
    """Of embedding, norm, head: what a cut trains itself. New networks and those of a path own all
    of them."""
    width: int | None
    """Of a new network, whose sizes are the target's where None."""
    heads: int | None
    """Of a new network."""
    kv_heads: int | None
    """Of a new network."""
    mlp: int | None
    """Of a new network: the width inside its MLPs."""
    loss: Mapping[str, float]
    """Weights of losses by name: `cross_entropy` against the target's text, and divergences between
    the two distributions."""
    beta: float
    """Of `jsd`."""
    on_policy: float
    """Share of training rows in which the drafter itself writes the answer and the target's
    distribution is learned on that."""
    on_policy_tokens: int
    """Most tokens of such an answer."""
    on_policy_temperature: float
    """At which it is written; 0 is greedy."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""
    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed, where the head is borrowed; None is the whole
    vocabulary."""

    def __post_init__(self) -> None:
        origin, mixture, writes = self.origin, self.mixture, self.writes
        if isinstance(origin, origins.Cut):
            object.__setattr__(self, "layers", list(origin.layers))
            object.__setattr__(self, "own", list(origin.own))
        if "head" in origin.owns and self.draft_ids is not None:
            raise InputError(
                "a reduced draft vocabulary takes rows of the target's own head, and this drafter "
                "has a head of its own: set draft_vocab=0, or borrow the head (a cut with own=[])"
            )
        if writes.share and not mixture.reads_target_probs:
            raise InputError(
                "on_policy: a loss that is only against the text learns nothing from the "
                "drafter's own answers: add a divergence"
            )
        integer("chunk", self.chunk, 1)

    @property
    def origin(self) -> origins.Origin:
        """Where the network comes from."""
        return origins.chosen(
            layers=self.layers,
            path=self.path,
            config=self.config,
            own=self.own,
            sizes={name: getattr(self, name) for name in origins.SIZES},
        )

    @property
    def mixture(self) -> Mixture:
        """What it learns: losses by name with their weights."""
        return Mixture(self.loss, self.beta)

    @property
    def writes(self) -> OnPolicy:
        """Which rows the drafter writes itself, and how."""
        return OnPolicy(self.on_policy, self.on_policy_tokens, self.on_policy_temperature)


class Ssm(Standalone, BorrowsHead, Autoregressive):
    """A causal LM over the target's vocabulary.

    Raises: InputError for another vocabulary, layers that are not there, pickled weights, code of a
    directory's own.
    """

    Config = SsmConfig
    config: SsmConfig

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.mixture, self.on_policy = self.config.mixture, self.config.writes
        self.needs = Needs(last_hidden=self.mixture.reads_target_probs)
        self.own = self.config.origin.owns
        """Of embedding, norm and head, those that it trains itself."""
        self.model: Any = self.config.origin.build(target)
        if self.config.path is not None:
            read = networks.plain_config(self.model)
            self.config = replace(self.config, path=None, config=read)
        self.to(target.device)
        self.network = Network(self.model, f"the drafter ({self._called})")
        self._check_vocabulary()
        probe(self.network)

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        names = ("layers", "path", "config", "own")
        origin = origins.chosen(
            **{name: settings[name] for name in names},
            sizes={name: settings[name] for name in origins.SIZES},
        )
        origin.check_held(target, tensors, weights)

    # What it is -----------------------------------------------------------------------------------
    @property
    def owns_all(self) -> bool:
        return len(self.own) == len(origins.PARTS)

    def standalone(self) -> tuple[Any, dict[str, Tensor]]:
        quantised = getattr(self.target.config, "quantization_config", None) is not None
        if not self.owns_all and quantised:
            raise InputError(
                f"target {self.target.name} is quantised, so what is borrowed of it cannot be "
                "written as plain weights"
            )
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        tensors |= lent_tensors(self.model)
        tied = self.network.output.weight is self.network.embedding.weight
        if tied:
            head = next(
                name for name, module in self.model.named_modules() if module is self.network.output
            )
            del tensors[f"{head}.weight"]
        return networks.config_of_standalone(self.model, tied), tensors

    def describe(self) -> dict[str, Any]:
        lent = [part for part in origins.PARTS if part not in self.own]
        return {
            "network": self._called,
            "borrowed": ", ".join(lent) or "nothing",
            **super().describe(),
        }

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return (*self.mixture.names, "accuracy")

    # Parts ----------------------------------------------------------------------------------------
    def head(self, hidden: Tensor) -> Tensor:
        if "head" not in self.own:
            return super().head(hidden)
        return self.network.head(hidden.to(self.dtype))

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Ssm:
        copy = super().at(dtype, target)
        assert isinstance(copy, Ssm)
        # Rotary frequencies and their like lose their meaning in low precision; transformers keeps
        # them in float32 too.
        for mine, theirs in zip(self.model.modules(), copy.model.modules(), strict=True):
            for name, buffer in mine._buffers.items():
                theirs._buffers[name] = buffer
        return copy

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        if self.on_policy.share:
            raise InputError(
                "trainer.pack: drafter.on_policy writes answers row by row, set trainer.pack=null "
                "or drafter.on_policy=0"
            )
        self.network.choose_isolation()

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        device = self.network.device
        written = torch.zeros(len(batch.lengths), dtype=torch.bool)
        if generator is not None:
            written = self.on_policy.chosen(batch, generator)
        parts = []
        if not bool(written.all()):
            teacher = features.last_hidden if self.mixture.reads_target_probs else None
            parts.append(self._aligned(self._as_given(batch, teacher, ~written)))
        if bool(written.any()):
            assert generator is not None
            parts.append(self._aligned(self._as_written(batch, written, generator)))
        read = _joined(parts)
        head = self.network.output.parameters() if "head" in self.own else ()
        found = mixed(
            read.hidden,
            torch.where(read.by_target, self.to_draft_ids(read.labels), -1),
            self.head,
            self.mixture,
            teacher=read.teacher,
            teacher_head=self._teacher_head,
            weights=read.weights,
            trained=[p for p in head if p.requires_grad],
            chunk=self.config.chunk,
        )
        count = torch.tensor(float(len(read.labels)), device=device)
        own = read.by_target.sum().float()  # of text to learn by heart
        sums = {name: (value, own if name == TEXT else count) for name, value in found.sums.items()}
        # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
        right = (self.to_target_ids(found.choices) == read.labels) & read.by_target
        sums["accuracy"] = (right.sum().float(), own)
        weight = count if read.weights is None else read.weights.sum()
        return Loss(found.total.float(), weight, sums)

    def _aligned(self, rows: _Rows) -> _Aligned:
        chosen = rows.mask[:, 1:]
        hidden = self.network.full_pass(rows.ids, rows.packing)[:, :-1][chosen]
        labels = rows.ids[:, 1:][chosen]
        return _Aligned(
            hidden,
            labels,
            torch.full_like(labels, rows.by_target, dtype=torch.bool),
            None if rows.teacher is None else rows.teacher[:, :-1][chosen],
            None if rows.weights is None else rows.weights[:, 1:][chosen],
        )

    def _as_given(self, batch: Batch, teacher: Tensor | None, chosen: Tensor | None) -> _Rows:
        """Rows as the set has them.

        Args:
            teacher: (b s d) the target's features.
            chosen: (b) bool which rows; None is all, and so it is for rows that were joined.
        """
        device = self.network.device

        def part(values: Tensor) -> Tensor:
            some = values if chosen is None else values[chosen.to(values.device)]
            return some.to(device)

        return _Rows(
            part(batch.input_ids),
            part(batch.labels(1)),
            None if teacher is None else part(teacher),
            True,
            None if batch.weights is None else part(batch.weights),
            None if batch.packing is None else batch.packing.to(device),
        )

    def _as_written(self, batch: Batch, chosen: Tensor, generator: torch.Generator) -> _Rows:
        """The drafter's own answers, after prompts of these rows, and what the target makes of
        them."""
        device = self.network.device
        answers = write_answers(self, batch, chosen, self.on_policy, generator)
        with torch.autocast(device.type, enabled=False):
            found = self.target.features(
                answers.input_ids, answers.lengths, Needs(last_hidden=True)
            ).last_hidden
        assert found is not None
        weights = None
        if batch.weights is not None:
            # What it writes itself counts as much as the row that it is written in the place of.
            own = batch.weights[chosen.to(batch.weights.device)].amax(1, keepdim=True).to(device)
            weights = own.expand(answers.input_ids.shape)
        return _Rows(
            answers.input_ids.to(device),
            answers.loss_mask.to(device),
            found.to(device),
            False,
            weights,
        )

    def _teacher_head(self, hidden: Tensor) -> Tensor:
        """(... d) the target's features -> (... w) its logits of what can be proposed."""
        if "head" not in self.own:
            return super().head(hidden)
        return self.target.head(hidden.to(self.target.dtype))

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        rows = self._as_given(batch, None, None)
        found = torch.full_like(rows.ids, -1)
        found[rows.mask] = best_ids(self, self._aligned(rows).hidden, self.head, self.config.chunk)
        return found[:, :, None]

    @torch.no_grad()
    def overlap(self, batch: Batch, features: Features) -> Tensor:
        """(b s) float32, teacher-forced: for every label sum_v min(p, q), how often a draft of it
        would be kept at temperature 1; 0 elsewhere.

        Args:
            features: with the target's last hidden states.
        """
        assert features.last_hidden is not None
        rows = self._as_given(batch, features.last_hidden, None)
        read, chunk = self._aligned(rows), self.config.chunk
        assert read.teacher is not None
        found = torch.zeros(rows.ids.shape, device=rows.ids.device)
        parts = []
        for mine, theirs in zip(read.hidden.split(chunk), read.teacher.split(chunk), strict=True):
            p = self.target.head(theirs.to(self.target.dtype)).float().softmax(-1)  # c v
            p = p if self.draft_ids is None else p[:, self.draft_ids]
            parts.append(torch.minimum(p, self.head(mine).float().softmax(-1)).sum(-1))
        if len(read.labels):
            found[rows.mask] = torch.cat(parts)
        return found

    # Decoding -------------------------------------------------------------------------------------
    def open(self, rows: int, capacity: int) -> SsmState:
        return SsmState(KVCache(rows, capacity + 1, self.network.device))

    def extend(
        self, state: AutoregressiveState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        assert isinstance(state, SsmState)
        ids, counts = committed.tokens, committed.counts
        if committed.first is not None:
            ids, counts = torch.cat((committed.first[:, None], ids), 1), counts + 1
        state.depths = []
        out = self.network.read(ids, state.cache)
        state.cache.commit(counts)
        last = out[torch.arange(len(out), device=out.device), counts - 1]  # b d
        return last[:, None], self.candidates(self.head(last)[:, None])

    def expand(
        self,
        state: AutoregressiveState,
        tokens: Tensor,
        hidden: Tensor,
        depth: int,
        tree_mask: Tensor,
    ) -> tuple[Tensor, Candidates]:
        assert isinstance(state, SsmState)
        m = tokens.shape[1]
        state.depths += [depth - 1] * m
        depths = torch.tensor([state.depths], device=tokens.device)
        out = self.network.read(tokens, state.cache, tree_mask=tree_mask, depths=depths)
        state.cache.advance(m)
        return out, self.candidates(self.head(out))

    # Inside ---------------------------------------------------------------------------------------
    @property
    def _called(self) -> str:
        origin = self.config.origin
        if isinstance(origin, origins.Cut):
            return f"layers {', '.join(map(str, origin.layers))} of {self.target.name}"
        config = self.model.config
        return (
            f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}"
        )

    def _check_vocabulary(self) -> None:
        mine = (self.network.embedding.weight.shape[0], self.network.vocab_size)
        needed = (self.target.embedding.weight.shape[0], self.target.vocab_size)
        if mine != needed:
            raise InputError(
                f"{self.network.called} has {mine[0]} embeddings and {mine[1]} logits, target "
                f"{self.target.name} has {needed[0]} and {needed[1]}: a drafter shares the "
                "target's vocabulary"
            )


def _joined(parts: Sequence[_Aligned]) -> _Aligned:
    """Several of them as one."""

    def joined(values: Sequence[Tensor | None]) -> Tensor | None:
        found = [one for one in values if one is not None]
        return torch.cat(found) if found else None

    return _Aligned(
        torch.cat([one.hidden for one in parts]),
        torch.cat([one.labels for one in parts]),
        torch.cat([one.by_target for one in parts]),
        joined([one.teacher for one in parts]),
        joined([one.weights for one in parts]),
    )
