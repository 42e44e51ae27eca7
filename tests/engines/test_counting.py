"""How rounds are counted next to an engine's: by hand, against a replay of each round, and against
transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafttrain.decoding.loop import Output, decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.export import export_package
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from scripts.engines import proof
from scripts.engines.proof import Counts, Job
from tests.drafter import make as drafters
from tests.packaging.made import overfitted, packed

PROMPTS = [[5, 6, 7], [9, 11, 13, 40], [21, 22]]
NEW, DEPTH = 12, 3


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.of(load.tiny(), Path("unused"), PROMPTS, NEW)


def shortened(job: Job, new: int) -> Job:
    return Job(job.target, job.folder, job.prompts, new, [text[:new] for text in job.texts])


def shaken(drafter: Drafter) -> Drafter:
    """A little away from where training starts: accepted often, not always."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.02 * torch.randn(p.shape, generator=chance)
    return drafter.eval()


def test_a_last_round_counts_all_that_it_accepted_and_none_begins_at_the_limit() -> None:
    """Runs are (written, accepted of these); the first is the pass that reads the prompt."""
    output = Output(runs=[(1, 0), (3, 2), (1, 0), (4, 3), (2, 1)])
    assert proof.counted([output], 5, 3) == Counts(2, 6, (1, 1, 0))
    assert proof.counted([output], 6, 3) == Counts(3, 9, (2, 2, 1)), "a token was still missing"
    assert proof.counted([output], 9, 3) == Counts(3, 9, (2, 2, 1)), (
        "the third round wrote the ninth token"
    )
    assert proof.counted([output], 10, 3) == Counts(4, 12, (3, 2, 1))
    assert proof.counted([output], 1, 3) == Counts(0, 0, (0, 0, 0)), (
        "the prompt's own pass is no round"
    )
    assert proof.counted([output, output], 5, 3) == Counts(4, 12, (2, 2, 0))


def replayed(target: Target, drafter: Drafter, job: Job, depth: int) -> Counts:
    """Every round from the start, from the text so far as a prompt of its own."""
    plan, rounds, accepted = Plan(Tree.chain(depth)), 0, [0] * depth
    for prompt, text in zip(job.prompts, job.texts, strict=True):
        written = 1
        while written < job.new:
            before = prompt + text[: written - 1]
            (output,), _ = decode(
                target, drafter, [before], plan, max_new_tokens=depth + 2, stop_ids=()
            )
            assert output.ids[0] == text[written - 1]
            emitted, kept = output.runs[1]
            rounds, written = rounds + 1, written + emitted
            for place in range(kept):
                accepted[place] += 1
    return Counts(rounds, rounds * depth, tuple(accepted))


@pytest.fixture(scope="module")
def by_heart(job: Job) -> Drafter:
    """Knows the first two answers."""
    return overfitted(job.target, PROMPTS[:2], tokens=NEW, steps=60)


@pytest.mark.parametrize("new", [NEW, NEW - 1, 1])
def test_rounds_as_vllm_counts_them(new: int, job: Job, by_heart: Drafter) -> None:
    shorter, drafter = shortened(job, new), by_heart
    found = proof.as_vllm(shorter, drafter, DEPTH)
    assert found == replayed(job.target, drafter, shorter, DEPTH)
    assert new == 1 or found.accepted[0] > 0
    own, _ = decode(
        job.target, drafter, PROMPTS, Plan(Tree.chain(DEPTH)), max_new_tokens=new, stop_ids=()
    )
    assert [output.ids for output in own] == shorter.texts


@pytest.mark.parametrize("new", [NEW, 2, 1])
def test_rounds_as_transformers_makes_them(new: int, job: Job, tmp_path: Path) -> None:
    """Its own loop, with the exported draft model."""
    target = job.target
    drafter = shaken(drafters.make(Ssm, target, layers=[0, 1, 2], draft_ids=list(range(0, 320, 2))))
    package = packed(tmp_path / "package", drafter, target)
    found = proof.on_transformers(shortened(job, new), package, tmp_path / "out", DEPTH)
    assert found.holds and found.same == len(PROMPTS)
    assert new < NEW or (
        found.ours is not None and found.ours.accepted[0] > 0 and found.ours.rounds > len(PROMPTS)
    )


def test_transformers_assistants_that_differ_are_noticed(job: Job, tmp_path: Path) -> None:
    target = job.target
    drafter = shaken(drafters.make(Ssm, target, layers=[0, 1, 2]))
    package = packed(tmp_path / "package", drafter, target)
    export_package(package, target, "hf", tmp_path / "out")
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assistant.model.norm.weight *= torch.linspace(-1, 1, 64)
    texts, theirs = proof.assisted(job, assistant, DEPTH)
    ours = proof.as_transformers(job, proof.over_full_vocabulary(drafter), DEPTH)
    assert job.same(texts) == len(PROMPTS) and theirs.accepted != ours.accepted


IDS = list(range(1, 201, 2))


@pytest.mark.parametrize("kind", [Eagle1, Medusa, Ssm])
def test_engines_draft_from_the_full_vocabulary(kind: type[Drafter], job: Job) -> None:
    more: dict[str, Any] = {"layers": [0]} if kind is Ssm else {}
    drafter = shaken(drafters.make(kind, job.target, draft_ids=IDS, **more))
    found = proof.over_full_vocabulary(drafter)
    assert (drafter.choices, found.choices) == (100, 320)
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if name != "draft_ids"}
    theirs = found.state_dict()
    assert kept.keys() == theirs.keys() and all(
        torch.equal(theirs[name], kept[name]) for name in kept
    )
    output = shaken(drafters.make(kind, job.target, **more))
    assert proof.over_full_vocabulary(output).choices == 320
