"""Every family of drafters at one budget: the same target, rows and minutes of training, and about
the same parameters where settings reach them; then tau by replay, draft cost and speed, in one
table.

Usage: python scripts/bench/families.py --out DIR [--minutes 10] [--families a,b] [words of fit ...]

A family is a recipe with the settings that bring it near the parameters of EAGLE-1 for the embedded
target: a line in FAMILIES. The rate's schedule ends by the clock, whose minutes are of training,
without the start and the measurement. Words of fit are taken by all families: another target, or
optim=muon. All families are trained first, each into DIR/runs/<family>, then measured. tau is
counted on the target's answers to the same held-out prompts, its difference to EAGLE-1's in pairs
of them; where a drafter runs layers of the target it is counted by decoding. The draft cost is the
time of growing a tree over that of a plain step.

DIR holds families.json and families.txt. The same command goes on where it was stopped; with more
families it makes only those.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from timing import count, reported

import drafttrain
from drafttrain.checks import word_of
from drafttrain.data.conversations import ConversationSet, read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.measure import Entrant, Measurement, measure_acceptance, race
from drafttrain.decoding.measurement import counts_of, gain, with_speed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import Replays, asked_replays, obstacle
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.files import write_json
from drafttrain.fitting.settings import read_settings
from drafttrain.packaging.manifest import PACKAGE, parameter_count, read_config, training_of
from drafttrain.reporting.console import clock, table, track
from drafttrain.reporting.rows import pair
from drafttrain.runs import differences
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import LAST
from drafttrain.training.run import CHECKPOINTS
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.building import build
from drafttrain.wiring.composing import compose

BASE = "eagle1"
"""The family that the others are compared with."""
FAMILIES: dict[str, tuple[str, ...]] = {
    BASE: ("experiment=eagle1",),
    "hass": ("experiment=eagle1", "drafter.steps=3", "drafter.topk_weight=1.0"),
    "eagle3": ("experiment=eagle3",),
    "mtp": ("experiment=mtp",),
    # Five heads fill the static tree.
    "medusa": ("experiment=medusa1", "drafter.heads=5", "drafter.blocks=2"),
    # Three times as many parameters: a head's first layer reads all tokens before its own.
    "hydra_heads": ("experiment=hydra_heads", "drafter.heads=5"),
    "ssm": ("experiment=ssm", "drafter.layers=[29]"),
    "early_exit": ("experiment=early_exit", "drafter.mlp=1920"),
    "ngram": ("experiment=ngram",),
    "suffix": ("experiment=suffix",),
    "selfspec": ("experiment=selfspec", "search=null"),
}
UNTRAINED = ("ngram", "suffix", "selfspec")
"""Of them: draft_vocab, where it is given for all, is not theirs."""
LIKE = (
    *("data.temperatures=[0.0]", "data.labels=all", "data.set_aside=0"),
    *("trainer.max_epochs=null", "trainer.max_steps=null"),
    *("optim.horizon=clock", "optim.warmup=0.05"),
    *("eval.every=null", "eval.prompts=0", "eval.sim_rows=0", "eval.speed_prompts=0"),
    *("checkpoint.every=200", "final.prompts=0", "final.speed_prompts=0"),
    *("final.calibrated=[]", "final.calibrated_speed=[]"),
)
"""What all families have alike: rows, the end by the clock, and nothing measured on the way."""
TREES: dict[str, Growth] = {
    "chain of 4": Tree.chain(4),
    "static 25": Tree.eagle1_static(),
    "dynamic 25": Dynamic(depth=5, top_k=8, total=25),
}
COLUMNS = (
    *("family", "tree", "tau", "95 %", f"over {BASE}", "95 %", "counted by", "draft cost"),
    *("speed", "95 %", "parameters", "updates", "minutes"),
)
SETTINGS, RESULT, TEXT = "settings.json", "families.json", "families.txt"


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder of the comparison")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of them, with commas")
    parser.add_argument("--minutes", type=minutes, default=10.0, help="of training, each")
    parser.add_argument("--tokens", type=count, default=None, help="supervised, at most")
    parser.add_argument("--prompts", type=count, default=100, help="held out, for tau")
    parser.add_argument("--new", type=count, default=128, help="tokens of an answer")
    parser.add_argument("--timed", type=whole, default=4, help="prompts for speed and cost")
    parser.add_argument("words", nargs="*", help="of fit, for all families")
    return parser.parse_intermixed_args()


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text[:40]}: needs a number of minutes above 0")
    return value


def whole(text: str) -> int:
    return 0 if text == "0" else count(text)


def chosen(text: str) -> list[str]:
    """Families by name, each once. Raises InputError for another name."""
    names = list(dict.fromkeys(text.split(",")))
    if odd := [name for name in names if name not in FAMILIES]:
        raise InputError(f"--families {odd[0][:40]}: give some of {', '.join(FAMILIES)}")
    return names


def words_of(name: str, options: argparse.Namespace) -> list[str]:
    """What a family's run is started with, its folder apart."""
    limits = [f"data.limit_tokens={word_of(options.tokens)}"]
    limits.append(f"trainer.max_minutes={options.minutes:g}")
    own = [*FAMILIES[name], *LIKE, *limits]
    words = [w for w in options.words if not (name in UNTRAINED and key_of(w) == "draft_vocab")]
    given = set(map(key_of, words))
    return [*(word for word in own if key_of(word) not in given), *words]


def key_of(word: str) -> str:
    return word.partition("=")[0]


def check(names: Sequence[str], options: argparse.Namespace) -> Any:
    """Refuse what any family's run would, before the first one. Returns: a configuration."""
    if odd := [word for word in options.words if key_of(word) in ("run_dir", "resume")]:
        raise InputError(f"{odd[0]}: runs go into --out, and go on by themselves")
    for name in names:
        try:
            config = compose("fit", words_of(name, options))
            read_settings(config)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return config


def open_folder(names: Sequence[str], options: argparse.Namespace) -> Path:
    """The comparison's folder. Raises InputError if it holds something else, or another
    comparison."""
    folder = Path(options.out).expanduser()
    settings = {
        **{name: getattr(options, name) for name in ("minutes", "tokens", "prompts", "new")},
        "timed": options.timed,
        "words": {name: words_of(name, options) for name in names},
    }
    noted = folder / SETTINGS
    if noted.is_file():
        before = json.loads(noted.read_text(encoding="utf-8"))
        settings["words"] = before["words"] | settings["words"]
        before["words"] = settings["words"] | before["words"]
        if other := differences(before, settings):
            listed = "; ".join(f"{key} was {a}, is {b}" for key, (a, b) in other.items())
            raise InputError(
                f"--out {options.out} holds another comparison ({listed[:400]}): set these back, "
                "or give another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {options.out} holds no comparison: give an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(noted, settings)
    return folder


def say(text: str) -> None:
    print(f"families: {text}", file=sys.stderr, flush=True)


def each(names: Sequence[str], what: str, guess: float | None) -> Iterator[str]:
    """The names, announced with the time that is left for this.

    Args:
        guess: seconds of one; later ones go by the mean of those that are done.
    """
    began = time.monotonic()
    for done, name in enumerate(names):
        mean = (time.monotonic() - began) / done if done else guess
        left = "" if mean is None else f", about {clock(mean * (len(names) - done))} left"
        say(f"{what} {name}, {done + 1} of {len(names)}{left}")
        yield name


# Training -----------------------------------------------------------------------------------------
def train(folder: Path, names: Sequence[str], options: argparse.Namespace) -> dict[str, str]:
    """A package of each family that has none. Returns: why those that failed did."""
    missing = [name for name in names if not package_of(folder, name).is_dir()]
    failed = {}
    for name in each(missing, "trains", 60 * options.minutes):
        if why := train_one(package_of(folder, name).parent, words_of(name, options)):
            failed[name] = why
            say(f"WARNING: {name} failed and is left out: {why}")
    return failed


def package_of(folder: Path, name: str) -> Path:
    return folder / "runs" / name / PACKAGE


def train_one(run: Path, words: Sequence[str]) -> str:
    """Start a run, or go on with it. Returns: why it failed, empty where it did not."""
    more = [f"run_dir={word_of(run)}"]
    if (run / CHECKPOINTS / LAST).is_file():
        more.append("resume=last")
    elif run.is_dir():
        shutil.rmtree(run)  # killed before there was anything to go on from
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("a", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-m", "drafttrain.fit", *words, *more],
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode in (130, 143) or done.returncode < 0:
        raise InputError(f"{run.name} was stopped: the same command goes on with it")
    lines = run.with_suffix(".log").read_text(encoding="utf-8", errors="replace").split("\n")
    return "" if not done.returncode else next((line for line in reversed(lines) if line), "?")


# Measuring ----------------------------------------------------------------------------------------
def watch(items: Sequence[int], what: str) -> Iterable[int]:
    return track(items, description=what, unit="prompts")


class Bench:
    """A target with its held-out prompts and answers."""

    def __init__(self, config: Any, options: argparse.Namespace) -> None:
        self.options = options
        self.target: Target = build(config.target, work="decode")
        rows: ConversationSet = read_set(set_folder(config.data.path))
        room = self.target.context - options.new
        self.prompts = [p for p in rows.prompts() if len(p) <= room][: options.prompts]
        if not self.prompts:
            raise InputError(f"--new {options.new}: no held-out prompt leaves room for it")
        self.replays: Replays = asked_replays(
            self.target, self.prompts, options.new, None, rows=rows, say=say, watch=watch
        )

    def measure(self, package: Path) -> dict[str, Any]:
        """What a package costs and accepts, plain JSON values."""
        drafter = drafttrain.load(package, self.target).drafter
        plans = {name: Plan(tree) for name, tree in TREES.items() if fills(drafter, tree)}
        timed = self.prompts[: self.options.timed]
        entrants = [Entrant(self.target, drafter, plan) for plan in plans.values()]
        raced: list[Measurement | None] = [None] * len(plans)
        if timed and plans:
            raced = list(race(entrants, timed, max_new_tokens=self.options.new, watch=watch))
        config = read_config(package)
        noted = config["training"].get("training") or {}
        return {
            "parameters": parameter_count(config),
            "training_seconds": training_of(config)[0],
            "updates": noted.get("updates"),
            "trees": {
                name: self.row(drafter, plan, speed)
                for (name, plan), speed in zip(plans.items(), raced, strict=True)
            },
        }

    def row(self, drafter: Drafter, plan: Plan, speed: Measurement | None) -> dict[str, Any]:
        settings: dict[str, Any] = {"max_new_tokens": self.options.new, "watch": watch}
        if obstacle(drafter, plan) is None:
            found = self.replays.measure(drafter, self.prompts, plan, **settings)
        else:
            found = measure_acceptance(self.target, drafter, self.prompts, plan, **settings)
        row = found.row() if speed is None else with_speed(found.row(), speed)
        return row | {
            "counts": counts_of(found),
            "draft_cost": None if speed is None else draft_cost(speed),
        }


def fills(drafter: Drafter, tree: Growth) -> bool:
    try:
        drafter.check(tree)
    except InputError:
        return False
    return True


def draft_cost(timed: Measurement) -> float | None:
    """Seconds of growing a tree over those of a plain step, in which one token is written."""
    plain, steps = timed.plain_stages, sum(timed.plain_tokens) - len(timed.plain_tokens)
    seconds = sum(value for stage, value in plain.items() if stage != "prefill")
    if not (steps and seconds and timed.tally.rounds):
        return None
    return timed.tally.seconds.get("draft", 0.0) / timed.tally.rounds / (seconds / steps)


def measure(
    folder: Path, names: Sequence[str], bench: Callable[[], Bench]
) -> dict[str, dict[str, Any]]:
    """What is known of each family, those that were not measured before included.

    Args:
        bench: makes it, where there is something to measure.
    """
    noted = folder / RESULT
    known = json.loads(noted.read_text(encoding="utf-8"))["families"] if noted.is_file() else {}
    missing = [n for n in names if n not in known and package_of(folder, n).is_dir()]
    made = bench() if missing else None
    for name in each(missing, "measures", None):
        assert made is not None
        known[name] = made.measure(package_of(folder, name))
        known = {name: known[name] for name in FAMILIES if name in known}
        write_json(noted, {"families": known, "over": over_base(known)})
    return known


# The table ----------------------------------------------------------------------------------------
def over_base(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By family and tree, by how much tau is above that of BASE on the same prompts."""
    base = known.get(BASE, {"trees": {}})["trees"]
    return {
        name: {
            tree: gain(row["counts"], base[tree]["counts"])
            for tree, row in one["trees"].items()
            if name != BASE and tree in base
        }
        for name, one in known.items()
    }


def lines(known: dict[str, dict[str, Any]]) -> Iterator[list[Any]]:
    over = over_base(known)
    for name, one in known.items():
        seconds = one["training_seconds"]
        for tree, row in one["trees"].items():
            more, interval = over[name].get(tree, (None, None))
            yield [
                *(name, tree, row["tau"], pair(row["tau_interval"]), more, interval),
                "replay" if row["replayed"] else "decoding",
                *(row["draft_cost"], row["speedup"], pair(row["speedup_interval"])),
                *(one["parameters"], one["updates"], None if seconds is None else seconds / 60),
            ]


def publish(folder: Path, known: dict[str, dict[str, Any]], title: str) -> None:
    shown = list(lines(known))
    with (folder / TEXT).open("w", encoding="utf-8") as file:
        table(title, COLUMNS, shown, out=Console(file=file, width=220, no_color=True))
    table(title, COLUMNS, shown)
    say(f"wrote {RESULT} and {TEXT} into {folder}")


def main() -> None:
    options = asked()
    names = chosen(options.families)
    config = check(names, options)
    folder = open_folder(names, options)
    failed = train(folder, names, options)
    known = measure(folder, names, lambda: Bench(config, options))
    if known:
        title = f"Families, {options.minutes:g} minutes each, {options.prompts} prompts at most"
        publish(folder, known, title)
    if failed:
        raise InputError(
            f"failed: {', '.join(failed)}; their output is in {folder / 'runs'}, and the same "
            "command tries them again"
        )


if __name__ == "__main__":
    reported(main)
