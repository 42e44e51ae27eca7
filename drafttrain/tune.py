"""Choose how a package decodes on this device, and keep the choice in its decoding.yaml.

Calibrate: decode prompts with a wide tree and count how often the child of each rank is accepted at
each depth. Measure what drafting and verifying cost here. Predict tokens a second for the best tree
of every size and depth. Race the most promising ones against plain decoding on further prompts; the
fastest wins, which may be plain decoding.

Of an ensemble every member grows a wide tree, and the drafts of every size are shared by what each
member adds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from drafttrain.asking.tune import Asked, check_settings
from drafttrain.wiring.doors import door

DOOR = door("tune", text=("prompts",), check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain.checks import path_of
from drafttrain.decoding.costs import measure_costs
from drafttrain.decoding.measure import Measurement
from drafttrain.decoding.members import followed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import refuse_unread
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.errors import InputError
from drafttrain.evaluating.answering import replays_for
from drafttrain.files import write_json
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.decoding import fit, read_plan
from drafttrain.packaging.manifest import DECODING, read_config
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.packaging.writing import change_plan, check_change
from drafttrain.reporting.console import reading, table, track
from drafttrain.reporting.rows import memories
from drafttrain.runs import new_folder, plain_value, provenance
from drafttrain.target.model import Target
from drafttrain.target.prompts import open_prompts
from drafttrain.tree.choice import CALIBRATION, SHARING, candidates, known
from drafttrain.tree.forest import Forest
from drafttrain.tree.search import expected_tokens
from drafttrain.tree.share import Followed, candidate_forests, expected
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.building import build

RESULT = "tuning.json"
NO_ROUND = (
    "no prompt had a round of drafts (answers end at once): give other prompts, or raise "
    "max_new_tokens"
)
RECORDED = ("temperature", "top_k", "top_p", "max_new_tokens", "seed")
SHOWN = 12


@DOOR
def main(cfg: DictConfig) -> None:
    asked = check_settings(cfg)
    package = path_of("package", cfg.package)
    read_config(package)
    if cfg.write:
        check_change(package)
    source = open_prompts(cfg.prompts, plain_value(cfg.columns), reading)
    target: Target = build(cfg.target, work="decode")
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    refuse_unread(asked.answers, drafter)
    plan = read_plan(package / DECODING, drafter)
    speculator = Speculator(target, drafter, plan, dtype=cfg.dtype)
    prompts = source.ids(target, asked.calibration_prompts + asked.race_prompts, say)
    more = [fit(Plan(tree), drafter, f"trees: {name}").tree for name, tree in asked.trees.items()]
    with new_folder(cfg.run_dir) as folder:
        to_calibrate = prompts[: asked.calibration_prompts]
        if asked.replay:
            speculator.replays = replays_for(
                target, to_calibrate, asked.max_new_tokens, asked.answers, source, say
            )
        calibration = calibrate(speculator, to_calibrate, asked)
        guesses = predict(speculator, calibration, prompts, asked)
        show_guesses(guesses)
        plans = racing(guesses, [speculator.plan.tree, *more], drafter, asked)
        # Prompts that were not calibrated on, where there are enough.
        unseen = prompts[asked.calibration_prompts :] or prompts
        raced = race(speculator, unseen[: asked.race_prompts], plans, asked)
        winner = choose(raced, asked.policy)
        show_race(raced, guesses)
        result = {
            "settings": {key: cfg[key] for key in RECORDED},
            "prompts": source.name,
            "rates": calibration.rates,
            "predicted": [guess.row() for guess in guesses],
            "raced": [found.row() for found in raced],
            "chosen": {
                "tree": winner.tree.title,
                "rule": winner.rule_name,
                "nodes": winner.tree.size,
            },
            "provenance": provenance(cfg),
        }
        write_json(folder / RESULT, result)
        say(verdict(winner, raced))
        if cfg.write:
            change_plan(package, winner)
            say(f"{package / DECODING} now says so")
        say(f"wrote {folder / RESULT}")


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What decoding with wide trees showed."""

    tau: float | None
    rates: list[list[float | None]] | None = None
    """By depth and rank, how often a child was the accepted one."""
    rounds: list[Followed] | None = None
    """Of an ensemble, how far each member's tree was followed."""

    def trees(self, sizes: Sequence[int]) -> list[Growth]:
        """Those worth measuring, of at most these numbers of nodes."""
        if self.rounds is not None:
            return list(candidate_forests(self.rounds, sizes))
        rates = known(self.rates or [])
        return list(candidates(rates, sizes)) if rates else []

    def tokens(self, tree: Growth) -> float:
        """Expected of a round with this tree."""
        if isinstance(tree, Forest):
            return expected([one for one in tree.trees if isinstance(one, Tree)], self.rounds or [])
        assert isinstance(tree, Tree)
        return expected_tokens(tree, known(self.rates or []))


@dataclass(frozen=True)
class Guess:
    """What a tree promises here."""

    tree: Growth
    tokens: float
    """Expected tokens a round."""
    seconds: float
    """Of drafting and verifying one."""
    speedup: float
    """Against plain decoding, whose round is one token and one target pass."""

    def row(self) -> dict[str, Any]:
        return {
            "tree": self.tree.title,
            "nodes": self.tree.size,
            "depth": self.tree.max_depth,
            "paths": self.tree.spec(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "speedup": self.speedup,
        }


def calibrate(
    speculator: Speculator, prompts: Sequence[Sequence[int]], asked: Asked
) -> Calibration:
    """Decode with a wide tree, as wide and deep as this drafter can fill."""
    drafter = speculator.drafter
    if isinstance(drafter, Ensemble):
        return calibrate_members(speculator, drafter, prompts, asked)
    wide = CALIBRATION if drafter.max_depth is None else CALIBRATION.capped(drafter.max_depth)
    wide = Tree.from_paths([path for path in wide.paths if max(path) < drafter.choices])
    say(f"calibrates: {len(prompts)} prompts with a tree of {wide.size}")
    found = speculator.measure_acceptance(
        prompts,
        Plan(wide, asked.policy),
        max_new_tokens=asked.max_new_tokens,
        batch=asked.batch,
        seed=asked.seed,
        watch=lambda items, what: track(items, description=what),
    )
    if not found.tally.rounds:
        raise InputError(NO_ROUND)
    return Calibration(found.tally.tau, rates=found.rates)


def calibrate_members(
    speculator: Speculator, drafter: Ensemble, prompts: Sequence[Sequence[int]], asked: Asked
) -> Calibration:
    """Decode with a wide tree for each member."""
    narrow = min(member.choices for member in drafter.drafters)
    wide = drafter.shaped(Tree.from_paths([path for path in SHARING.paths if max(path) < narrow]))
    say(f"calibrates: {len(prompts)} prompts with trees of {wide.size} in all")
    rounds = followed(
        speculator.target,
        drafter,
        prompts,
        wide,
        max_new_tokens=asked.max_new_tokens,
        policy=asked.policy,
        batch=asked.batch,
        seed=asked.seed,
        stand_in=speculator.stand_in(Plan(wide, asked.policy)),
        watch=lambda items, what: track(items, description=what),
    )
    if not rounds:
        raise InputError(NO_ROUND)
    return Calibration(1 + sum(max(map(len, one)) for one in rounds) / len(rounds), rounds=rounds)


def predict(
    speculator: Speculator, calibration: Calibration, prompts: Sequence[Sequence[int]], asked: Asked
) -> list[Guess]:
    """The best trees of all sizes and depths with what they promise, the most promising first."""
    trees = calibration.trees(asked.sizes)
    if not trees:
        return []
    target, drafter = speculator.target, speculator.drafter
    context = round(statistics.median(map(len, prompts))) + asked.max_new_tokens // 2
    room = target.context - max(*asked.sizes, *(tree.size for tree in trees), 1) - 2
    costs = measure_costs(
        target,
        drafter,
        asked.policy,
        trees,
        context=max(1, min(context, room)),
        emitted=max(1, round(calibration.tau or 1)),
        watch=lambda items, what: track(items, description=what),
    )
    guesses = []
    for tree in trees:
        tokens, seconds = calibration.tokens(tree), costs.round(tree)
        guesses.append(Guess(tree, tokens, seconds, tokens * costs.verified[0] / seconds))
    return sorted(guesses, key=lambda guess: -guess.speedup)


def racing(
    guesses: Sequence[Guess], more: Sequence[Growth], drafter: Drafter, asked: Asked
) -> list[Plan]:
    """The most promising trees, those that race in any case, and further rules where they fit."""
    trees: list[Growth] = [guess.tree for guess in guesses[: asked.race]]
    trees += [tree for tree in more if tree.size]
    plans = [Plan(tree, asked.policy).made_by(drafter) for tree in dict.fromkeys(trees)]
    if not asked.policy.greedy:
        for plan in list(plans):
            for rule in asked.rules:
                other = replace(plan, rule=rule)
                if other.misfit is None and other.rule_name != plan.rule_name:
                    plans.append(other)
    return list(dict.fromkeys(plans))


def race(
    speculator: Speculator, prompts: Sequence[Sequence[int]], plans: Sequence[Plan], asked: Asked
) -> list[Measurement]:
    if not plans:
        return []
    say(f"races {len(plans)} plans against plain decoding on {len(prompts)} prompts")
    return speculator.measure_speed(
        prompts,
        plans,
        max_new_tokens=asked.max_new_tokens,
        seed=asked.seed,
        watch=lambda items, what: track(items, description=what),
    )


def choose(raced: Sequence[Measurement], policy: Policy) -> Plan:
    """The fastest; plain decoding where nothing is faster."""
    timed = [found for found in raced if found.speedup is not None]
    best = max(timed, key=lambda found: found.speedup or 0.0, default=None)
    if best is None or (best.speedup or 0.0) < 1:
        return Plan(Tree.chain(0), policy)
    return best.plan


# --- what people see ------------------------------------------------------------------------------


def show_guesses(guesses: Sequence[Guess]) -> None:
    columns = ("tree", "depth", "tokens a round", "ms a round", "predicted speed-up")
    rows = [
        [guess.tree.title, guess.tree.max_depth, guess.tokens, 1e3 * guess.seconds, guess.speedup]
        for guess in guesses[:SHOWN]
    ]
    table(f"predicted, the best {len(rows)} of {len(guesses)} trees", columns, rows)


def show_race(raced: Sequence[Measurement], guesses: Sequence[Guess]) -> None:
    predicted: dict[Growth, float] = {guess.tree: guess.speedup for guess in guesses}
    columns = ("tree", "depth", "rule", "tau", "speed-up", "interval", "predicted", "guarantee")
    rows = [
        [
            found.plan.tree.title,
            found.plan.tree.max_depth,
            found.plan.rule_name,
            found.tally.tau,
            found.speedup,
            found.speedup_interval,
            predicted.get(found.plan.tree),
            found.row()["guarantee"],
        ]
        for found in raced
    ]
    table("raced against plain decoding", columns, rows)
    for line in memories([found.row() | {"label": found.plan.tree.title} for found in raced]):
        say(line)


def verdict(winner: Plan, raced: Sequence[Measurement]) -> str:
    if not winner.tree.size:
        found = [found.speedup for found in raced if found.speedup is not None]
        best = f", the best of {len(found)} reached {max(found):.2f}x" if found else ""
        return f"plain decoding is fastest on this device{best}"
    speedup = next(found.speedup for found in raced if found.plan == winner)
    return (
        f"fastest on this device is {winner.tree.title} with rule {winner.rule_name}, "
        f"{speedup:.2f}x plain decoding"
    )


def say(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
