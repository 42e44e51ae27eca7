"""Does another version of this repository train the same weights and write the same text?

    python tests/same_weights.py <other checkout> [--embedded] [--only experiment ...]

Runs every recipe in small on a tiny target in both checkouts, with one thread and one seed, and
compares the packages: the bytes of every tensor file (the tensors, where only the file's header
differs), and the counts and ids that were decoded. `--embedded` adds `experiment=quickstart
data.limit_tokens=8000` on the embedded target. For a change that is to alter no behaviour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent.parent
TINY = [
    "target=tiny",
    "target.dtype=float32",
    "target.device=cpu",
    "trainer.accelerator=cpu",
    "data=set",
    "data.temperatures=null",
]
TRAINED = [
    "data.set_aside=4",
    "trainer.max_steps=3",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "eval.every=2",
    "eval.prompts=2",
    "eval.max_new_tokens=6",
    "eval.speed_prompts=0",
    "final.prompts=2",
    "final.max_new_tokens=6",
]
MEASURED = ["final.prompts=2", "final.max_new_tokens=8", "final.speed_prompts=0"]
BOOST = [
    "boost.reference=4",
    "boost.match=1",
    "boost.least_gain=0",
    "boost.share_new_tokens=16",
    "boost.nodes=5",
    "drafter.layers=[0, 2]",
    "draft_vocab=64",
]
SKIPS = [
    "drafter.skip_attention=[1]",
    "drafter.skip_mlp=[2]",
    "search.trials=3",
    "search.prompts=2",
    "search.max_new_tokens=5",
    "search.first_tokens=16",
]
SHORT = ["draft_vocab=64", *TRAINED]
CASES: dict[str, list[str]] = {
    "eagle1": SHORT,
    "eagle1_paper": TRAINED,
    "eagle3": SHORT,
    "early_exit": [*SHORT, "drafter.exit_layer=1"],
    "hydra_heads": SHORT,
    "medusa1": SHORT,
    "medusa2": SHORT,
    "ngram": MEASURED,
    "quickstart": SHORT,
    "selfspec": [*MEASURED, *SKIPS],
    "smoke": SHORT,
    "specinfer": [*TRAINED, *BOOST],
    "ssm": [*SHORT, "drafter.layers=[0, 2]"],
    "suffix": MEASURED,
}
VARIANTS: dict[str, list[str]] = {
    "smoke trainer.pack=64": [*SHORT, "trainer.pack=64"],
    "smoke drafter=medusa drafter.own_head=true": [
        *SHORT,
        "drafter=medusa",
        "drafter.own_head=true",
        "drafter.heads=4",
        "final.speed.chain_5=null",
        "final.acceptance.static_25=null",
    ],
    "ssm drafter.layers=2 drafter.on_policy=0.5": [
        *TRAINED,
        "draft_vocab=0",
        "drafter.layers=2",
        "drafter.on_policy=0.5",
        "drafter.on_policy_tokens=6",
    ],
}
MAKE_SET = """
import sys
from pathlib import Path
from drafttrain.target import load
from tests.training.parts import write_tiny_set
write_tiny_set(load.tiny(dtype="float32", device="cpu"), Path(sys.argv[1]))
"""


def run(checkout: Path, words: list[str]) -> None:
    """One command in a checkout, on one thread."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **threads, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(words)}\n{done.stderr[-2000:]}")


def tensors_of(package: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(package)): load_file(path)
        for path in sorted(package.rglob("*.safetensors"))
    }


def differences(mine: Path, theirs: Path) -> list[str]:
    """What two packages do not have in common, times apart."""
    found = []
    ours, others = tensors_of(mine), tensors_of(theirs)
    if ours.keys() != others.keys():
        return [f"files {sorted(ours)} and {sorted(others)}"]
    for name, tensors in ours.items():
        if (mine / name).read_bytes() == (theirs / name).read_bytes():
            continue
        same = tensors.keys() == others[name].keys() and all(
            torch.equal(tensor, others[name][key]) for key, tensor in tensors.items()
        )
        found.append(f"{name}: {'header only' if same else 'OTHER WEIGHTS'}")
    rows = [json.loads((p / "metrics.json").read_text())["rows"] for p in (mine, theirs)]
    for one, other in zip(*rows, strict=True):
        for key in ("label", "tau", "accept_at", "rounds", "accepted_per_round", "node_counts"):
            if one.get(key) != other.get(key):
                found.append(f"{one['label']}: {key} {one.get(key)} and {other.get(key)}")
    texts = [json.loads((p.parent / "run.json").read_text())["samples"] for p in (mine, theirs)]
    return found + ["sample answers"] * (texts[0] != texts[1])


def compared(name: str, words: list[str], other: Path, folder: Path) -> bool:
    runs = []
    for number, checkout in enumerate((HERE, other)):
        out = folder / "runs" / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{number}"
        run(checkout, ["-m", "drafttrain.fit", *words, f"run_dir={out}"])
        runs.append(out / "package")
    found = differences(*runs)
    print(f"{name}: {'the same' if not found else '; '.join(found)}", flush=True)
    return all(line.endswith("header only") for line in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    other = given.other.resolve()
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(other, ["-c", MAKE_SET, str(folder / "set")])
        place = [*TINY, f"data.path={folder / 'set'}"]
        for name, words in (CASES | VARIANTS).items():
            if given.only and name not in given.only:
                continue
            recipe, *_ = name.split()
            mine = list(words)
            if recipe == "suffix":
                mine += [f"drafter.corpus={folder / 'set'}", "drafter.corpus_tokens=300"]
            good &= compared(name, [f"experiment={recipe}", *place, *mine], other, folder)
        if given.embedded:
            words = ["experiment=quickstart", "data.limit_tokens=8000", "target.dtype=float32"]
            good &= compared("quickstart, embedded", words, other, folder)
    print("the same weights and text" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
