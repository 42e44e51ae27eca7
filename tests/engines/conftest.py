"""One target, one set of answers and one drafter of each kind, for all tests that run an engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafttrain.packaging.manifest import read_config
from scripts.engines import proof
from scripts.engines.proof import Job
from tests.engines.heads import KINDS, learned

PROMPTS, NEW = 8, 32


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The embedded target, also as a directory, and its plain answers to prompts of the shipped
    set."""
    target = proof.embedded()
    folder = proof.write_target(target, tmp_path_factory.mktemp("target"))
    return Job.of(target, folder, proof.prompts_of(PROMPTS), NEW)


@pytest.fixture(scope="session")
def packages(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of each kind: those that DRAFTTRAIN_PACKAGES lists, the others made here."""
    given = [
        Path(path) for path in os.environ.get("DRAFTTRAIN_PACKAGES", "").split(os.pathsep) if path
    ]
    found = {read_config(path)["drafter"]["_target_"].rpartition(".")[2]: path for path in given}
    place = tmp_path_factory.mktemp("packages")
    return {
        kind: found[kind] if kind in found else learned(kind, job, place / kind) for kind in KINDS
    }


@pytest.fixture(scope="session")
def vllm() -> Path:
    """Its environment. One that is not there is an error: a check that did not run is not a check
    that passed."""
    return proof.check_venv(proof.venv())


@pytest.fixture(scope="session")
def speculators() -> Path:
    """The environment of that library."""
    return proof.check_venv(proof.venv("speculators"), "speculators")
