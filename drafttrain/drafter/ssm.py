"""A small causal LM as drafter (the SSM of SpecInfer, Miao et al. 2023, arXiv:2305.09781; the draft
model of Leviathan et al. 2023), trained by distillation (DistillSpec, Zhou et al. 2024,
arXiv:2310.08461).

Alignment, 0-based, for a row x_0..x_{T-1} with the target's features h_i (what its LM head reads):

| row i  | reads    | position | soft label          | predicts | weight    |
| 0..T-2 | x_0..x_i | i        | softmax(head(h_i))  | x_{i+1}  | m_{i+1}   |

The weight is the label's mask. While decoding, the same rows are read into a cache of its own:
those of committed tokens stay, and each round reads anew what was accepted, the anchor last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer, shown
from drafttrain.drafter import origins
from drafttrain.drafter.base import Autoregressive, AutoregressiveState, Committed
from drafttrain.drafter.borrowing import BorrowsHead
from drafttrain.drafter.lending import lent_tensors
from drafttrain.drafter.on_policy import OnPolicy, write_answers
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Packing
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.mixture import TEXT, Mixture, mixed
from drafttrain.target.model import Target

FORWARD_KL = {"forward_kl": 1.0}


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
    """(b s d) the target's features, where its law is needed."""
    by_target: bool
    """Did the target write these rows? Only then are they text to learn by heart."""
    weights: Tensor | None
    """(b s) of the labels, where they do not count alike."""
    packing: Packing | None = None
    """Where rows lie that were joined into sequences."""


class Ssm(BorrowsHead, Autoregressive):
    """A causal LM over the target's vocabulary. One of three origins:

    - `layers=[0, 1, 14, 29]`: these layers of the target, copied; embedding, final norm and head
      are the target's, frozen and never saved, but for those in `own`, which are copied and
      trained.
    - `layers=4`: new in the target's family, with random weights, in the sizes given.
    - `path`: a directory of `transformers`; `config` is what a package keeps of it.

    Args:
        target: the frozen model.
        draft_ids: (w) ascending ids that can be proposed, where the head is borrowed; None is the
            whole vocabulary.
        own: of embedding, norm, head: what a cut trains itself. New networks and those of a path
            own all of them.
        width, heads, kv_heads, mlp: sizes of a new network; None is the target's.
        loss: weights of losses by name: `cross_entropy` against the target's text, and divergences
            between the two laws.
        beta: of `jsd`.
        on_policy: share of training rows in which the drafter itself writes the answer and the
            target's law is learned on that.
        on_policy_tokens: most tokens of such an answer.
        on_policy_temperature: at which it is written; 0 is greedy.
        chunk: positions whose logits exist at one time in the loss.
    Raises: InputError for another vocabulary, layers that are not there, pickled weights, code of a
    directory's own.
    """

    writes = True

    def __init__(
        self,
        target: Target,
        *,
        draft_ids: Tensor | list[int] | None = None,
        layers: int | Sequence[int] | None = None,
        path: str | None = None,
        config: Mapping[str, Any] | None = None,
        own: Sequence[str] = (),
        width: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        mlp: int | None = None,
        loss: Mapping[str, float] | None = None,
        beta: float = 0.5,
        on_policy: float = 0.0,
        on_policy_tokens: int = 64,
        on_policy_temperature: float = 1.0,
        chunk: int = 256,
    ) -> None:
        super().__init__(target, draft_ids)
        self.mixture = Mixture(FORWARD_KL if loss is None else loss, beta)
        self.on_policy = OnPolicy(on_policy, on_policy_tokens, on_policy_temperature)
        if self.on_policy.share and not self.mixture.reads_target_probs:
            raise InputError(
                "on_policy: a loss against the text alone learns nothing from the drafter's own "
                "answers: add a divergence"
            )
        integer("chunk", chunk, 1)
        self.chunk = chunk
        self.needs = Needs(last_hidden=self.mixture.reads_target_probs)
        given = dict(config) if isinstance(config, Mapping) else config
        self.origin: dict[str, Any] = {"layers": layers, "path": path, "config": given}
        self.sizes: dict[str, int | None] = {
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "mlp": mlp,
        }
        self.own = self._owned(own)
        self.model: Any = self._network()
        if path is not None:
            self.origin |= {"path": None, "config": origins.plain_config(self.model)}
        self.to(target.device)
        self.network = Network(self.model, f"the drafter ({self._called})")
        self._check_vocabulary()
        self.network.probe()

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        if settings["path"] is not None:
            raise InputError(
                f"path={shown(settings['path'])}: a package holds its drafter itself and names no "
                f"directory"
            )
        sizes = {name: settings[name] for name in origins.SIZES}
        origins.check_held(target, settings["layers"], sizes, settings["config"], tensors, weights)

    # What it is -----------------------------------------------------------------------------------
    def settings(self) -> dict[str, Any]:
        return {
            **self.origin,
            **self.sizes,
            "own": list(self.own) if self._is_cut else [],
            "loss": dict(self.mixture.weights),
            "beta": self.mixture.beta,
            "on_policy": self.on_policy.share,
            "on_policy_tokens": self.on_policy.tokens,
            "on_policy_temperature": self.on_policy.temperature,
            "chunk": self.chunk,
            "draft_ids": None if self.draft_ids is None else self.draft_ids.tolist(),
        }

    @property
    def owns_all(self) -> bool:
        return len(self.own) == len(origins.PARTS)

    def standalone(self) -> tuple[Any, dict[str, Tensor]]:
        quantised = getattr(self.target.config, "quantization_config", None) is not None
        if not self.owns_all and quantised:
            raise InputError(
                f"target {self.target.name} is quantised, so what is borrowed of it cannot be "
                f"written as plain weights"
            )
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        tensors |= lent_tensors(self.model)
        tied = self.network.output.weight is self.network.embedding.weight
        if tied:
            head = next(
                name for name, module in self.model.named_modules() if module is self.network.output
            )
            del tensors[f"{head}.weight"]
        return origins.config_of_standalone(self.model, tied), tensors

    @property
    def trained_vocabulary(self) -> tuple[str, ...]:
        parts = {"embedding": self.network.embedding, "head": self.network.output}
        mine = [module for part, module in parts.items() if part in self.own]
        return tuple(
            f"model.{name}.weight" for name, module in self.model.named_modules() if module in mine
        )

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
        parts = [] if bool(written.all()) else [self._as_given(batch, features, ~written, device)]
        if bool(written.any()):
            assert generator is not None
            parts.append(self._as_written(batch, written, generator))
        out, labels, given, teachers, weights = [], [], [], [], []
        for rows in parts:
            chosen = rows.mask[:, 1:]
            out.append(self.network.full_pass(rows.ids, rows.packing)[:, :-1][chosen])  # t d
            labels.append(rows.ids[:, 1:][chosen])
            given.append(torch.full_like(labels[-1], rows.by_target, dtype=torch.bool))
            if rows.teacher is not None:
                teachers.append(rows.teacher[:, :-1][chosen])
            if rows.weights is not None:
                weights.append(rows.weights[:, 1:][chosen])
        weight = torch.cat(weights) if weights else None
        hidden, text, by_target = torch.cat(out), torch.cat(labels), torch.cat(given)
        found = mixed(
            hidden,
            torch.where(by_target, self.to_draft_ids(text), -1),
            self.head,
            self.mixture,
            teacher=torch.cat(teachers) if teachers else None,
            teacher_head=self._teacher_head,
            weights=weight,
            trained=[p for p in self.network.output.parameters() if p.requires_grad]
            if "head" in self.own
            else (),
            chunk=self.chunk,
        )
        count = torch.tensor(float(len(text)), device=device)
        own = by_target.sum().float()  # of text to learn by heart
        sums = {name: (value, own if name == TEXT else count) for name, value in found.sums.items()}
        # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
        right = ((self.to_target_ids(found.choices) == text) & by_target).sum().float()
        sums["accuracy"] = (right, own)
        # Every parameter takes part, so that no process waits for a gradient that another one has.
        nothing = torch.stack([p.sum() for p in self.parameters()]).sum() * 0.0
        return Loss(
            (found.total + nothing).float(), count if weight is None else weight.sum(), sums
        )

    def _as_given(
        self, batch: Batch, features: Features, chosen: Tensor, device: torch.device
    ) -> _Rows:
        labels = batch.labels(1)
        ids, mask = (
            batch.input_ids[chosen.to(batch.input_ids.device)],
            labels[chosen.to(labels.device)],
        )
        teacher = features.last_hidden
        if not self.mixture.reads_target_probs:
            teacher = None
        if teacher is not None:
            teacher = teacher[chosen.to(teacher.device)].to(device)
        weights = batch.weights
        if weights is not None:
            weights = weights[chosen.to(weights.device)].to(device)
        packing = (
            None if batch.packing is None else batch.packing.to(device)
        )  # then no row is written anew
        return _Rows(ids.to(device), mask.to(device), teacher, True, weights, packing)

    def _as_written(self, batch: Batch, chosen: Tensor, generator: torch.Generator) -> _Rows:
        """The drafter's own answers, behind prompts of these rows, and what the target makes of
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
        device = self.network.device
        ids, chosen = batch.input_ids.to(device), batch.loss_mask[:, 1:].to(device)
        found = torch.full_like(ids, -1)
        out = self.network.full_pass(ids)[:, :-1][chosen]
        parts = [self.head(part).argmax(-1) for part in out.split(self.chunk)] if len(out) else []
        if parts:
            found[:, 1:][chosen] = self.to_target_ids(torch.cat(parts))
        return found[:, :, None]

    @torch.no_grad()
    def overlap(self, batch: Batch, features: Features) -> Tensor:
        """(b s) float32, teacher-forced: for every label sum_v min(p, q), how often a draft of it
        would be kept at temperature 1; 0 elsewhere.

        Args:
            features: with the target's last hidden states.
        """
        device = self.network.device
        ids, chosen = batch.input_ids.to(device), batch.loss_mask[:, 1:].to(device)
        assert features.last_hidden is not None
        teacher = features.last_hidden.to(device)[:, :-1][chosen]  # t d
        out = self.network.full_pass(ids)[:, :-1][chosen]
        found = torch.zeros(ids.shape, device=device)
        parts = []
        for mine, theirs in zip(out.split(self.chunk), teacher.split(self.chunk), strict=True):
            p = self.target.head(theirs.to(self.target.dtype)).float().softmax(-1)  # c v
            p = p if self.draft_ids is None else p[:, self.draft_ids]
            parts.append(torch.minimum(p, self.head(mine).float().softmax(-1)).sum(-1))
        if len(out):
            found[:, 1:][chosen] = torch.cat(parts)
        return found

    # Decoding -------------------------------------------------------------------------------------
    def open(self, rows: int, capacity: int) -> SsmState:
        return SsmState(KVCache(rows, capacity + 1, self.network.device))

    def extend(self, state: AutoregressiveState, committed: Committed) -> tuple[Tensor, Tensor]:
        assert isinstance(state, SsmState)
        ids, counts = committed.tokens, committed.counts
        if committed.first is not None:
            ids, counts = torch.cat((committed.first[:, None], ids), 1), counts + 1
        state.depths = []
        out = self.network.read(ids, state.cache)
        state.cache.commit(counts)
        last = out[torch.arange(len(out), device=out.device), counts - 1]  # b d
        return last, self.head(last)

    def expand(
        self,
        state: AutoregressiveState,
        tokens: Tensor,
        hidden: Tensor,
        depth: int,
        tree_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(state, SsmState)
        m = tokens.shape[1]
        state.depths += [depth - 1] * m
        depths = torch.tensor([state.depths], device=tokens.device)
        out = self.network.read(tokens, state.cache, tree_mask=tree_mask, depths=depths)
        state.cache.advance(m)
        return out, self.head(out)

    # Inside ---------------------------------------------------------------------------------------
    @property
    def _is_cut(self) -> bool:
        return isinstance(self.origin["layers"], list)

    @property
    def _called(self) -> str:
        if self._is_cut:
            return f"layers {', '.join(map(str, self.origin['layers']))} of {self.target.name}"
        config = self.model.config
        return (
            f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}"
        )

    def _owned(self, own: Sequence[str]) -> tuple[str, ...]:
        """What it trains itself; everything that contradicts itself is refused here, before
        anything is built."""
        layers, given = (
            self.origin["layers"],
            [name for name, value in self.origin.items() if value is not None],
        )
        if len(given) != 1:
            raise InputError(
                f"the drafter's origin is {' and '.join(given) or 'not given'}: give one of "
                f"layers=[..] (cut from the target), "
                "layers=<a number> (new), path=<a directory>"
            )
        if isinstance(layers, list | tuple):
            self.origin["layers"] = layers = list(layers)
        elif layers is not None and type(layers) is not int:
            raise InputError(
                f"layers={shown(layers)}: needs a whole number, or a list of the target's layers "
                f"such as [0, 1]"
            )
        sized = [name for name, value in self.sizes.items() if value is not None]
        if sized and type(layers) is not int:
            raise InputError(
                f"{sized[0]}={self.sizes[sized[0]]}: only a new network takes sizes, and that is "
                f"layers=<a number>"
            )
        if not isinstance(own, list | tuple) or not all(part in origins.PARTS for part in own):
            raise InputError(
                f"own={shown(own)}: needs a list of some of {', '.join(origins.PARTS)}"
            )
        if own and not self._is_cut:
            raise InputError(f"own={list(own)}: only a cut borrows of the target; set it to []")
        found = (
            tuple(part for part in origins.PARTS if part in own) if self._is_cut else origins.PARTS
        )
        if "head" in found and self.draft_ids is not None:
            raise InputError(
                "a reduced draft vocabulary takes rows of the target's own head, and this drafter "
                "has a head of its own: set "
                "draft_vocab=0, or borrow the head (a cut with own=[])"
            )
        return found

    def _network(self) -> Any:
        layers, path, config = (self.origin[name] for name in ("layers", "path", "config"))
        if path is not None:
            return origins.from_directory(path, self.target)
        if config is not None:
            return origins.described(config)
        if self._is_cut:
            return origins.cut(self.target, layers, self.own)
        return origins.new(self.target, layers, self.sizes)

    def _check_vocabulary(self) -> None:
        mine = (self.network.embedding.weight.shape[0], self.network.vocab_size)
        wanted = (self.target.embedding.weight.shape[0], self.target.vocab_size)
        if mine != wanted:
            raise InputError(
                f"{self.network.called} has {mine[0]} embeddings and {mine[1]} logits, target "
                f"{self.target.name} has {wanted[0]} "
                f"and {wanted[1]}: a drafter shares the target's vocabulary"
            )
