"""The configuration ends at the door: typed parts are made of it, files keep what was settled."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import fit
from drafttrain.data.tokens import TokenData
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.fitting.given import read_data
from drafttrain.fitting.settings import read_settings
from drafttrain.runs import plain
from drafttrain.target import load
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
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


# F88 stands for a list of ids given by hand: next to a size, which would have replaced it; next to
# a package, which has one of its own; and one that is no list of rising ids of the target.
@pytest.mark.field("F88")
@pytest.mark.parametrize(
    ("more", "needed"),
    [
        (["draft_vocab=64"], r"drafter\.draft_ids and draft_vocab=64"),
        (["draft_vocab=0", "init_from=x"], r"drafter\.draft_ids and init_from=x"),
        (["draft_vocab=0", "drafter.draft_ids=[3,4.5]"], r"drafter\.draft_ids holds 4\.5:"),
        (
            ["draft_vocab=0", "drafter.draft_ids=[3,3]"],
            r"drafter\.draft_ids holds 3 after 3: needs",
        ),
        (
            ["draft_vocab=0", "drafter.draft_ids=[5,3]"],
            r"drafter\.draft_ids holds 3 after 5: needs",
        ),
        (["draft_vocab=0", "drafter.draft_ids=[-1,3]"], r"drafter\.draft_ids holds -1:"),
        (["draft_vocab=0", "drafter.draft_ids=[true]"], r"drafter\.draft_ids holds True:"),
        (["draft_vocab=0", "drafter.draft_ids=[]"], r"drafter\.draft_ids=\[\]:"),
        (["draft_vocab=0", "drafter.draft_ids=7"], r"drafter\.draft_ids=7:"),
        (["draft_vocab=0", "drafter.draft_ids=abc"], r"drafter\.draft_ids=abc:"),
    ],
)
def test_a_list_of_draft_ids_is_checked_before_the_target(more: list[str], needed: str) -> None:
    given = [word.replace("drafter.draft", "+drafter.draft") for word in more]
    if not any(word.startswith("+") for word in given):
        given.append("+drafter.draft_ids=[3,4]")
    with pytest.raises(InputError, match=rf"^{needed}"):
        read_settings(compose("fit", ["experiment=smoke", "data.path=x", *given]))


@pytest.mark.field("F88")
def test_a_list_of_draft_ids_is_the_targets() -> None:
    target = load.tiny()
    kept = ["experiment=smoke", "data.path=x", "draft_vocab=0", "+drafter.draft_ids=[3,9]"]
    parts = read_settings(compose("fit", kept))
    assert parts.drafter.get("draft_ids") == [3, 9]
    assert drafters.make(Eagle1, target, draft_ids=[3, 9]).choices == 2
    with pytest.raises(InputError, match=r"draft_ids holds 999: needs .* from 0 to 319"):
        drafters.make(Eagle1, target, draft_ids=[3, 999])


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


def test_held_out_prompts_that_training_has_too_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours: all are unlike; the row that is alike is not taken for training."""
    for alike, limit, expected in ((True, None, "1 of 2 held-out"), (True, 3, ""), (False, 9, "")):
        rows: list[dict[str, Any]] = [
            {"input_ids": [9, n, 5, 6], "loss_mask": [0, 0, 1, 1]} for n in range(10)
        ]
        rows[7]["input_ids"][1] = 1 if alike else 77
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = functools.partial(TokenData, path, held_out=2)
        parts: Any = SimpleNamespace(
            data=lambda split, data=data, limit=limit, **more: data(
                split=split, **({"limit_rows": limit} if split == "train" else {}), **more
            )
        )
        read_data(parts)
        said = capsys.readouterr()
        warned = [line for line in (said.out + said.err).splitlines() if "WARNING" in line]
        assert [expected in line for line in warned] == [True] * bool(expected), warned
