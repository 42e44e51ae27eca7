"""A sweep of six runs against three single runs: seconds of the commands, the sweep's over those of
the three together.

Usage: python scripts/bench/sweep.py [--all] [words of fit ...]

Without words: the embedded target, 24,000 supervised tokens of its set, two epochs. Every command
is a process of its own, so that what a sweep saves counts: the start, the target, its pass over the
rows. Of a sweep only the best run is measured at its end and packaged; with `--all` every one is.
The single runs are three of the sweep's, before it and after it, each with the val/tau that the
sweep found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import reported

from drafttrain.checks import word_of
from drafttrain.errors import InputError
from drafttrain.fitting.book import BOOK
from drafttrain.reporting.loggers import read_metrics

RUNS, SINGLE = 6, 3
RATES, WEIGHTS = ("4e-4", "8e-4", "1.6e-3"), ("1", "10")
PART = ["experiment=quickstart", "data.limit_tokens=24000", "trainer.max_epochs=2"]
GOAL = 1.7


def timed(words: list[str]) -> float:
    """Seconds of one command. Raises InputError with its last line if it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "drafttrain.fit", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}")
    return time.perf_counter() - began


def single(folder: Path, words: list[str], number: int) -> tuple[float, float]:
    """Seconds and the best val/tau of one of the runs."""
    rate, weight = RATES[number // len(WEIGHTS)], WEIGHTS[number % len(WEIGHTS)]
    run = folder / f"single-{number}"
    own = [f"optim.lr={rate}", f"drafter.regression={weight}", f"run_dir={word_of(run)}"]
    seconds = timed([*words, *own])
    taus = [row["val/tau"] for row in read_metrics(run / "metrics.csv") if "val/tau" in row]
    return seconds, max(taus)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    words = options.words or PART
    more = ["sweep.packages=all"] if options.all else []
    with tempfile.TemporaryDirectory(prefix="drafttrain-sweep-") as place:
        folder, run = Path(place), Path(place) / "sweep"
        found = {0: single(folder, words, 0)}
        several = [f"optim.lr={','.join(RATES)}", f"drafter.regression={','.join(WEIGHTS)}"]
        sweep = timed(["-m", *words, *several, f"run_dir={word_of(run)}", *more])
        found |= {number: single(folder, words, number) for number in (3, 4)}
        rows = json.loads((run / BOOK).read_text())["runs"]
    assert len(rows) == RUNS and len(found) == SINGLE
    for number, (seconds, tau) in found.items():
        print(f"single {number + 1}: {seconds:.1f} s, val/tau {tau:.3f}")
        print(f"  in the sweep: val/tau {max(rows[number]['taus'].values()):.3f}")
    three = sum(seconds for seconds, _ in found.values())
    print(f"sweep of {RUNS}: {sweep:.1f} s; {SINGLE} single runs: {three:.1f} s")
    print(f"sweep over single runs: {sweep / three:.2f} (at most {GOAL} is wanted)")


if __name__ == "__main__":
    reported(main)
