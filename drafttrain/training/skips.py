"""Which sub-layers `selfspec` leaves out, searched by decoding (Zhang et al. 2024,
arXiv:2309.08168, section 3.3).

The source maximises tokens a second on some prompts by Bayesian optimisation: a Gaussian process
over [0, 1]^2L, cut at one half. Departs from it:

- The optimiser is optuna's tree-structured Parzen estimator over 2L choices: no thresholds, and the
  same for the same seed.
- It starts with guesses. On a little text, every single sub-layer is left out, and the target's
  distribution compared with the one without it. The first trials leave out the sub-layers that
  harm least, more of them every time.
- Tokens are divided by what decoding them costs: a pass of the target costs one, a draft the share
  of the weights that it reads. That is proportional to time where reading weights takes most of
  it, and the same on every machine. `objective: speed` counts seconds, as the source does.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Watch, measure_acceptance, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.errors import InputError
from drafttrain.flow import Tally
from drafttrain.nn.losses import forward_kl
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.topology import Growth

EXTRA = "pip install 'drafttrain[search]'"
OBJECTIVES = ("cost", "speed")
PARTS = ("attention", "mlp")
FIRST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of all sub-layers that the first trials leave out."""
Choice = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers whose attention is left out, and those whose MLP is."""


@dataclass(frozen=True)
class Trial:
    """A choice, and the value of decoding with it."""

    choice: Choice
    value: float
    tau: float | None

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "skip_attention": list(self.choice[0]),
            "skip_mlp": list(self.choice[1]),
            "value": self.value,
            "tau": self.tau,
        }


@dataclass(frozen=True)
class Found:
    """What a search found."""

    drafter: SelfSpec
    """Of the best trial, the first of equals."""
    best: Trial
    trials: list[Trial] = field(repr=False)
    search: SkipSearch
    seconds: float = 0.0
    """That it took."""

    def facts(self) -> dict[str, Any]:
        """What stands in the place of training, plain JSON values."""
        return {"search_seconds": round(self.seconds, 1), "trials": len(self.trials)}

    def row(self) -> dict[str, Any]:
        """As a package's metrics have it: what was searched, and the best."""
        names = ("objective", "prompts", "max_new_tokens", "first_tokens")
        return {
            "trials": len(self.trials),
            **{name: getattr(self.search, name) for name in names},
            "best": self.best.row(),
        }


@dataclass(frozen=True, kw_only=True)
class SkipSearch:
    """How to search. Greedy decoding of training prompts, which are none of those that the result
    is measured on."""

    trials: int
    """Choices that are tried, the first guesses included."""
    prompts: int
    max_new_tokens: int
    batch: int
    """Prompts decoded at once, with objective cost."""
    objective: str
    """cost or speed."""
    first_tokens: int
    """Tokens of text on which sub-layers are left out one by one for first guesses; 0 makes
    none."""

    def __post_init__(self) -> None:
        least = {"trials": 1, "prompts": 1, "max_new_tokens": 2, "batch": 1, "first_tokens": 0}
        for name, low in least.items():
            integer(f"search.{name}", getattr(self, name), low)
        if self.objective not in OBJECTIVES:
            raise InputError(
                f"search.objective={self.objective}: give one of {', '.join(OBJECTIVES)}"
            )
        need_optuna()

    def check(self, kind: type[Drafter]) -> None:
        """Raise InputError for a drafter that leaves nothing out."""
        if not issubclass(kind, SelfSpec):
            raise InputError(
                f"search chooses what drafter=selfspec leaves out, the drafter is {kind.__name__}: "
                "set search=null"
            )

    def run(
        self,
        drafter: SelfSpec,
        tree: Growth,
        data: ConversationData,
        *,
        seed: int = 0,
        watch: Watch = unwatched,
    ) -> Found:
        """Try choices one after another.

        Args:
            drafter: what it leaves out is the first guess.
            tree: drafts are made with it.
            data: its rows' prompts are decoded.
        Raises: InputError if no prompt leaves room in the target's context.
        """
        drafter.check(tree)
        target, count = drafter.target, len(drafter.target.decoder_layers)
        prompts = prompts_of(data, self.prompts, target.context - self.max_new_tokens)
        guesses: list[Choice] = [
            (tuple(drafter.config.skip_attention), tuple(drafter.config.skip_mlp))
        ]
        if self.first_tokens:
            guesses += first_guesses(harm(target, texts_of(data, self.first_tokens), watch), count)
        study = study_of(guesses, count, seed)
        if self.objective == "speed":  # What is done first takes longer.
            self._tried(drafter, guesses[0], tree, prompts[:1], seed)
        known: dict[Choice, Trial] = {}
        trials: list[Trial] = []
        for _ in watch(range(self.trials), "choices decoded"):
            asked = study.ask()
            choice = choice_of(asked, count)
            if choice not in known:
                known[choice] = self._tried(drafter, choice, tree, prompts, seed)
            trials.append(known[choice])
            study.tell(asked, trials[-1].value)
        best = max(trials, key=lambda trial: trial.value)
        return Found(_changed(drafter, best.choice), best, trials, self)

    def _tried(
        self, drafter: SelfSpec, choice: Choice, tree: Growth, prompts: list[list[int]], seed: int
    ) -> Trial:
        if len(choice[0]) == len(choice[1]) == len(drafter.target.decoder_layers):
            return Trial(choice, 0.0, None)  # nothing is left to draft with
        changed, plan = _changed(drafter, choice), Plan(tree)
        if self.objective == "cost":
            found = measure_acceptance(
                drafter.target,
                changed,
                prompts,
                plan,
                max_new_tokens=self.max_new_tokens,
                batch=self.batch,
                seed=seed,
            )
            return Trial(choice, tokens_per_cost(found.tally, tree, changed.share), found.tally.tau)
        tokens, tally, began = 0, Tally(), time.perf_counter()
        for prompt in prompts:
            (output,), more = decode(
                drafter.target,
                changed,
                [prompt],
                plan,
                max_new_tokens=self.max_new_tokens,
                seed=seed,
            )
            tokens += len(output.ids)
            tally += more
        return Trial(choice, tokens / (time.perf_counter() - began), tally.tau)


def study_of(guesses: Sequence[Choice], count: int, seed: int) -> Any:
    """An optuna study that tries the guesses first.

    Args:
        count: decoder layers of the target.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, n_startup_trials=max(10, len(guesses))
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for guess in guesses:
        named = zip(PARTS, guess, strict=True)
        study.enqueue_trial(
            {
                f"{part}_{layer}": layer in layers
                for part, layers in named
                for layer in range(count)
            },
            skip_if_exists=True,
        )
    return study


def choice_of(asked: Any, count: int) -> Choice:
    """What an optuna trial leaves out."""
    attention, mlp = (
        tuple(
            layer
            for layer in range(count)
            if asked.suggest_categorical(f"{part}_{layer}", [False, True])
        )
        for part in PARTS
    )
    return attention, mlp


def need_optuna() -> None:
    """Raise InputError if the library that chooses what to try next is not there."""
    if importlib.util.find_spec("optuna") is None:
        raise InputError(
            f"searching what to leave out needs optuna, which is not installed: {EXTRA}; or set "
            "search=null and give drafter.skip_attention and drafter.skip_mlp yourself"
        )


def tokens_per_cost(tally: Tally, tree: Growth, share: float) -> float:
    """Tokens written for each pass of the target that decoding costs; plain decoding comes to 1.

    Args:
        share: what a pass of the draft costs, a pass of the target over any number of drafts being
            1.
    """
    passes = tally.rounds * tree.max_depth
    if isinstance(tree, Confident):
        # One more than it drafts, unless it drafts all.
        passes = min(passes, tally.drafted + tally.rounds)
    cost = tally.rounds + passes * share
    return tally.emitted / cost if cost else 0.0


def prompts_of(data: ConversationData, count: int, room: int) -> list[list[int]]:
    """Ids before the first answer of the first rows, of at most `room` tokens."""
    found: list[list[int]] = []
    for index in data.indices:
        ids, mask = data.set.row(index)
        prompt = ids[: int(mask.long().argmax())].tolist()
        if prompt and len(prompt) <= room:
            found.append(prompt)
        if len(found) == count:
            break
    if not found:
        raise InputError(
            f"no training prompt leaves room in the target's context, {room} tokens: lower "
            "search.max_new_tokens"
        )
    return found


def texts_of(data: ConversationData, tokens: int) -> list[Tensor]:
    """(1 s) the first rows, `tokens` tokens together."""
    found: list[Tensor] = []
    for place in range(len(data)):
        ids = data.row(place)[0][None, :tokens]
        if tokens < 2:
            break
        found.append(ids)
        tokens -= ids.shape[1]
    return found


@torch.inference_mode()
def harm(
    target: Target, texts: Sequence[Tensor], watch: Watch = unwatched
) -> dict[tuple[str, int], float]:
    """{(part, layer): KL of the target's distribution and the one without that sub-layer}.

    Summed over texts, which are read teacher-forced; every pass has its own keys and values.
    """
    stack, found = target.stack, dict[tuple[str, int], float]()
    for number in watch(range(len(texts)), "texts read without each sub-layer"):
        ids = texts[number].to(target.device)
        cache = target.new_cache(1, ids.shape[1])
        before = [stack.embed(ids)]
        inputs = stack.inputs(before[0], cache)
        for step in stack.steps:
            before.append(stack.run(before[-1], inputs, [step]))
        complete = target.head(stack.norm(before[-1])).float()
        for layer in range(len(stack)):
            for part in PARTS:
                # Layers before it do what they did.
                steps = [step for step in stack.without(**{part: [layer]}) if step.layer >= layer]
                lacking = target.head(stack.norm(stack.run(before[layer], inputs, steps))).float()
                value = float(forward_kl(lacking, complete).sum())
                found[part, layer] = found.get((part, layer), 0.0) + value
    return found


def first_guesses(harms: dict[tuple[str, int], float], count: int) -> list[Choice]:
    """The sub-layers that harm least, more of them in every guess."""
    order = sorted(harms, key=lambda key: harms[key])
    guesses: list[Choice] = []
    for share in FIRST:
        least = order[: round(2 * count * share)]
        attention, mlp = (
            tuple(sorted(layer for name, layer in least if name == part)) for part in PARTS
        )
        if least and (attention, mlp) not in guesses:
            guesses.append((attention, mlp))
    return guesses


def _changed(drafter: SelfSpec, choice: Choice) -> SelfSpec:
    return SelfSpec(
        drafter.target, skip_attention=choice[0], skip_mlp=choice[1], draft_ids=drafter.draft_ids
    ).eval()
