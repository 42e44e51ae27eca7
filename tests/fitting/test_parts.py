"""The configuration ends at the door: typed parts are made of it, files keep what was settled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import fit
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.fitting.settings import read_settings
from drafttrain.runs import plain
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.wiring.composing import compose
from tests.fitting.parts import UNMEASURED, words


def test_parts_are_what_was_composed() -> None:
    cfg = compose("fit", ["experiment=smoke", "data.path=x", "seed=3", "run_dir=here"])
    parts = read_settings(cfg)
    assert parts.config.values == plain(cfg)
    assert (parts.seed, parts.run_dir, parts.resume, parts.draft_vocab) == (3, "here", None, 64)
    assert parts.kind is Eagle1 and parts.learns and parts.settings.trainer.max_steps == 12
    assert parts.target.get("dtype") == cfg.target.dtype and parts.data.get("path") == "x"


# The kind: a section of which nothing was chosen, and into which an experiment writes. Neighbours:
# joint, boost and search; a setting of such a section on the command line.
@pytest.mark.parametrize(
    ("experiment", "section"),
    [("medusa2", "joint"), ("specinfer", "boost"), ("selfspec", "search")],
)
def test_what_is_chosen_to_be_none_stays_none(experiment: str, section: str) -> None:
    words = [f"experiment={experiment}", f"{section}=null"]
    parts = read_settings(compose("fit", words))
    assert getattr(parts.settings, section) is None and parts.config.values[section] is None
    key = next(iter(plain(compose("fit", words[:1]))[section].keys() - {"_target_"} & KEYS))
    with pytest.raises(InputError, match=f"{section}=null has no settings; give {section}=<choic"):
        compose("fit", [*words, f"{section}.{key}=1"])


KEYS = {"lambda_0", "match", "trials"}
"""That the experiments set."""


def test_nothing_is_written_to_after_the_door() -> None:
    parts = read_settings(compose("fit", ["experiment=smoke", "data.path=x"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.seed = 4  # type: ignore[misc]
    other = parts.settled({"seed": 4, "target.device": "cpu", "run_dir": "there"})
    assert (other.seed, other.run_dir, other.target.get("device")) == (4, "there", "cpu")
    assert (parts.seed, parts.run_dir) == (0, None) and parts.config.values["seed"] == 0
    assert other.settings is parts.settings


@pytest.mark.parametrize("word", ["run_dir=2024", "run_dir=[a]", "resume=7", "resume=''"])
def test_folders_and_checkpoints_are_paths(word: str) -> None:
    with pytest.raises(InputError, match=rf"^{word.partition('=')[0]}="):
        read_settings(compose("fit", ["experiment=smoke", "data.path=x", word]))


def test_files_of_a_run_keep_its_settled_configuration(folder: Path, tmp_path: Path) -> None:
    """Byte for byte what the composed configuration holds, with device, dtype and folder as they
    were settled."""
    run = tmp_path / "run"
    given = words(folder, run, *UNMEASURED, "trainer.max_steps=2", "trainer.accelerator=cpu")
    given += ["target.dtype=auto", "target.device=auto"]
    fit.main(given)
    cfg = compose("fit", given)
    last = run / "checkpoints" / "last.ckpt"
    state = read_checkpoint(last)
    dtype = state["facts"]["target"]["dtype"]
    assert dtype in ("float32", "bfloat16")
    cfg.target.dtype, cfg.target.device = dtype, "cpu"
    assert (run / "config.yaml").read_text() == OmegaConf.to_yaml(cfg)
    assert state["settings"] == plain(cfg)
    assert packaged(run)["target"] == plain(cfg)["target"]
    assert packaged(run)["run_dir"] == run.name, "no absolute path leaves the machine"

    # A checkpoint's path says which folder its run has.
    given = [word for word in given if not word.startswith("run_dir=")]
    fit.main([*given, f"resume={last}"])
    assert packaged(run)["run_dir"] == run.name and packaged(run)["resume"] == last.name
    assert (run / "config.yaml").read_text() == OmegaConf.to_yaml(cfg), "that of the first part"


def packaged(run: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((run / "package" / "config.json").read_text())
    kept: dict[str, Any] = config["training"]["config"]
    return kept
