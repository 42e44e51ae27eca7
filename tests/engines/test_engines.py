"""Exports on real engines: the target's own text, every tensor read, and every accepted draft as in
drafttrain's own loop.

    scripts/engines/setup.sh && scripts/engines/setup.sh speculators && pytest -m engines

Some minutes: vLLM takes about one for each start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.export import export_package
from drafttrain.layouts.directory import open_directory
from drafttrain.packaging.reading import load_drafter
from scripts.engines import proof
from scripts.engines.proof import Job
from tests.engines.heads import KINDS
from tests.layouts.made import names, put, tensors

pytestmark = [pytest.mark.engines, pytest.mark.real]
TOKENS = 4
PLENTY = 40
"""Rounds from which a difference in drafting shows."""


def test_vllm_decodes_plainly_as_drafttrain_does(vllm: Path, job: Job) -> None:
    """What the other tests rest on."""
    served = proof.serve(vllm, job, None)
    assert served.texts == job.texts and served.counts is None


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_drafts_as_the_package_does(
    kind: str, vllm: Path, job: Job, packages: dict[str, Path], tmp_path: Path
) -> None:
    found = proof.on_vllm(vllm, job, packages[kind], tmp_path / "head", TOKENS)
    assert found.same == found.prompts, "the text is not the target's own"
    assert found.unread == ()
    assert found.theirs == found.ours
    # Counts that could not be wrong would show nothing.
    assert (
        found.ours is not None
        and found.ours.rounds > PLENTY
        and found.ours.accepted[0] > found.ours.accepted[1] > 0
    )


def test_a_head_that_reads_the_halves_of_its_input_in_the_wrong_order_is_noticed(
    vllm: Path, job: Job, packages: dict[str, Path], tmp_path: Path
) -> None:
    """The text is the target's own all the same, and only the counts show it."""
    exported = export_package(
        packages["Eagle1"], job.target, "vllm", out := tmp_path / "head", tokens=TOKENS
    )
    width = job.target.width
    swap = tensors(
        lambda held: held.update(
            {"fc.weight": torch.cat(held["fc.weight"].split(width, 1)[::-1], 1)}
        )
    )
    swap(out)
    served = proof.serve(vllm, job, proof.speculative_of(exported.command))
    ours = proof.as_vllm(
        job, proof.over_full_vocabulary(load_drafter(packages["Eagle1"], job.target)), TOKENS
    )
    found = proof.vllm_result("Eagle1", job, served, ours, set(open_directory(out, "head").tensors))
    assert found.same == found.prompts and found.unread == () and not found.holds
    assert served.counts is not None and served.counts.accepted[0] < ours.accepted[0]


def test_a_tensor_that_vllm_passes_over_is_noticed(
    vllm: Path, job: Job, packages: dict[str, Path], tmp_path: Path
) -> None:
    """As it does with what it does not know in Medusa's files, without a word."""
    heads = load_drafter(packages["Medusa"], job.target).max_depth
    exported = export_package(
        packages["Medusa"], job.target, "vllm", out := tmp_path / "head", tokens=heads
    )
    put("stranger", 4, 4)(out)
    served = proof.serve(vllm, job, proof.speculative_of(exported.command))
    held = set(open_directory(out, "head").tensors)
    assert proof.vllm_result("Medusa", job, served, served.counts, held).unread == ("stranger",)


def test_transformers_drafts_as_the_package_does(
    job: Job, packages: dict[str, Path], tmp_path: Path
) -> None:
    found = proof.on_transformers(job, packages["Ssm"], tmp_path / "draft", TOKENS)
    assert found.same == found.prompts and found.unread == ()
    assert found.theirs == found.ours
    assert (
        found.ours is not None
        and found.ours.rounds > PLENTY
        and found.ours.accepted[0] > found.ours.accepted[1] > 0
    )


@pytest.fixture(scope="module")
def written(speculators: Path, job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the library speculators wrote itself."""
    place = tmp_path_factory.mktemp("speculators")
    words = [
        str(speculators / "bin/python"),
        str(proof.HERE / "written.py"),
        str(job.folder),
        str(place / "out"),
    ]
    proof.run(words, place / "log", proof.SECONDS)
    return place / "out"


def test_what_the_library_speculators_writes_is_understood(written: Path, job: Job) -> None:
    """Nothing but warnings, and the one fault that its own defaults bring."""
    path_and_rope = {"verifier-path": False, "rope-old-spelling-missing": False}
    more = {"dflash": {"dflash-causal": True}, "dspark": {"runner": False}}
    found = {folder.name: names(folder, "vllm", job.folder) for folder in written.iterdir()}
    kinds = [
        f"{kind}-{words}"
        for kind in ("eagle3", "peagle", "dflash", "dspark")
        for words in ("reduced", "whole")
    ]
    assert found == {kind: path_and_rope | more.get(kind.partition("-")[0], {}) for kind in kinds}


def test_vllm_serves_what_speculators_wrote_and_nothing_fatal_was_found_in(
    vllm: Path, written: Path, job: Job
) -> None:
    path = written / "eagle3-reduced"
    speculative = {"method": "eagle3", "model": str(path), "num_speculative_tokens": TOKENS}
    served = proof.serve(vllm, job, speculative)
    assert served.texts == job.texts and served.counts is not None and served.counts.rounds > PLENTY
    # A map between vocabularies that is lost costs acceptance without a word: vLLM must have read
    # it.
    assert {"d2t", "fc.weight", "lm_head.weight"} <= set(served.read)
