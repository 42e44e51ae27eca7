"""The wheel: it holds what the checkout holds, and works where there is no checkout."""

from __future__ import annotations

import email.parser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from drafttrain.packaging.manifest import PACKAGE, read_config
from drafttrain.target import load
from tests.training.parts import write_tiny_set

ROOT = Path(__file__).resolve().parent.parent
DOORS = sorted(path.stem for path in (ROOT / "conf").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as an environment holds it, without what it needs of others."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def held(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_it_holds_the_package_its_settings_and_the_set_that_ships(unpacked: Path) -> None:
    package = unpacked / "drafttrain"
    assert held(package / "conf") == held(ROOT / "conf") and len(DOORS) > 8
    assert held(package) - {f"conf/{name}" for name in held(ROOT / "conf")} == held(
        ROOT / "drafttrain"
    )
    for name in ("data/sets/smollm2/conversations.safetensors", "conf/fit.yaml", "wiring/conf.py"):
        there = ROOT / name if name.startswith("conf") else ROOT / "drafttrain" / name
        assert (package / name).read_bytes() == there.read_bytes()
    (other,) = (path for path in unpacked.iterdir() if path != package)
    assert other.name.startswith("drafttrain-") and other.name.endswith(".dist-info")


def test_it_names_what_it_needs(unpacked: Path) -> None:
    (path,) = unpacked.glob("*.dist-info/METADATA")
    facts = email.parser.Parser().parsestr(path.read_text(encoding="utf-8"))
    needs = [
        line.partition(";")[0].partition(">")[0]
        for line in facts.get_all("Requires-Dist", [])
        if "extra ==" not in line
    ]
    assert {"torch", "transformers", "lightning", "hydra-core", "safetensors"} <= set(needs)
    assert not any("smollm2" in line for line in facts.get_all("Requires-Dist", [])), (
        "its own dependencies compile an engine"
    )
    assert facts["License-Expression"] == "Apache-2.0" and "# drafttrain" in str(
        facts.get_payload()
    )


def elsewhere(unpacked: Path, place: Path, *words: str) -> str:
    """What a program says that finds only the wheel's files, in a folder of its own."""
    settings = {
        "PYTHONPATH": str(unpacked),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("DRAFTTRAIN_")
    }
    found = subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


ALL_HELP = """
import runpy, sys
import drafttrain, drafttrain.wiring.conf
print(drafttrain.__file__, drafttrain.wiring.conf.conf_dir(), drafttrain.__version__)
for door in sys.argv[1:]:
    sys.argv = [door, "--help"]
    runpy.run_module(f"drafttrain.{door}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_every_command_says_its_settings_outside_of_a_checkout(
    unpacked: Path, tmp_path: Path
) -> None:
    first, _, said = elsewhere(unpacked, tmp_path, "-c", ALL_HELP, *DOORS).partition("\n")
    package = unpacked / "drafttrain"
    assert (
        first.split()[:2] == [str(package / "__init__.py"), str(package / "conf")]
        and first.split()[2][0].isdigit()
    )
    for door in DOORS:
        assert f"Usage: python -m drafttrain.{door} " in said
    assert "  experiment: " in said and "smollm2" in said
    assert not list(tmp_path.iterdir()), "asking for help leaves no files"


@pytest.mark.slow
@pytest.mark.processes
def test_a_fit_runs_outside_of_a_checkout(unpacked: Path, tmp_path: Path) -> None:
    place = tmp_path / "somewhere"
    place.mkdir()
    folder = write_tiny_set(load.tiny(), tmp_path / "set")
    words = [
        "experiment=smoke",
        f"data.path={folder}",
        "run_dir=run",
        "trainer.max_steps=2",
        "eval.every=null",
    ]
    words += ["final.prompts=2", "final.speed_prompts=0"]
    said = elsewhere(unpacked, place, "-m", "drafttrain.fit", *words)
    assert "the package is in" in said
    config = read_config(place / "run" / PACKAGE)
    assert config["drafter"]["_target_"] == "drafttrain.drafter.eagle1.Eagle1"
    assert config["training"]["commit"] is None and not config["made_with"].endswith("checkout")
