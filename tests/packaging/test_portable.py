"""Packages say how they were made, and name no folder of the machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from drafttrain import fit
from drafttrain.packaging.collection import read_entries
from drafttrain.packaging.portable import portable
from drafttrain.reporting.records import read_record
from drafttrain.target import load
from tests.fitting.parts import UNMEASURED, words
from tests.training.parts import write_tiny_set


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_set(load.tiny(), tmp_path_factory.mktemp("set"))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/home/ann/models/llama", "llama"),
        ("/home/ann/my models/llama 2/", "llama 2"),
        ("~/models/llama", "llama"),
        ("/home/ann/runs/first/package/", "first/package"),
        ("/package", "package"),
        ("/home/ann/package", "package"),
        ("~ann/package", "package"),
        (r"C:\Users\ann\package", "package"),
        ("/home/ann", "~"),
        (r"C:\Users\ann\llama", "llama"),
        ("file:///home/ann/llama", "llama"),
        ("[/home/ann/a,/home/ann/b]", "[a,b]"),
        ("read from /home/ann/rows.jsonl: 3 rows", "read from rows.jsonl: 3 rows"),
        ("runs/mine/package", "runs/mine/package"),
        ("../runs/mine", "../runs/mine"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("https://arxiv.org/abs/2401.15077", "https://arxiv.org/abs/2401.15077"),
        ("builtin:smollm2", "builtin:smollm2"),
        (
            "12 tokens / s, 1/2, and/or, </s>, <|im_end|>",
            "12 tokens / s, 1/2, and/or, </s>, <|im_end|>",
        ),
    ],
)
def test_of_an_absolute_path_the_last_name_is_kept(given: str, kept: str) -> None:
    assert portable(given) == kept
    assert portable({"a": [given, 1, None, True, 0.5]}) == {"a": [kept, 1, None, True, 0.5]}


def test_a_command_is_read_word_by_word() -> None:
    words = [
        "python",
        "-m",
        "drafttrain.fit",
        "run_dir=/home/ann/my runs/a",
        "runs=[/x/b,runs/c]",
        "+data.path=/d/e=f",
        "seed=1",
    ]
    kept = [
        "python",
        "-m",
        "drafttrain.fit",
        "run_dir=a",
        "runs=[b,runs/c]",
        "+data.path=e=f",
        "seed=1",
    ]
    assert portable({"command": shlex.join(words)}) == {"command": shlex.join(kept)}
    assert portable({"command": "an open ' quote /home/ann/a"}) == {"command": "an open ' quote a"}
    assert portable({"command": None}) == {"command": None}


def test_a_package_and_its_card_name_no_folder_of_this_machine(
    tmp_path: Path, data_folder: Path
) -> None:
    """Run folder, data and an earlier package are given by absolute paths, as anybody may."""
    first, second = tmp_path / "first run", tmp_path / "second"
    args = ["trainer.max_steps=2", "logger=none", *UNMEASURED]
    fit.main(words(data_folder, first, *args))
    fit.main(words(data_folder, second, *args, f"init_from={first / 'package'}"))
    for path in [*(first / "package").rglob("*"), *(second / "package").rglob("*")]:
        if path.is_file():
            held = path.read_bytes()
            for folder in (tmp_path, data_folder, Path.cwd(), Path.home()):
                assert f"{folder}/".encode() not in held, path
    training = json.loads((second / "package" / "config.json").read_text())["training"]
    config = training["config"]
    assert (config["init_from"], config["run_dir"]) == ("first run/package", "second")
    assert "run_dir=second" in training["command"] and "/" not in training["command"].replace(
        "first run/package", ""
    )
    (entry,) = read_entries([second / "package"], measured=True)
    assert entry.facts()["begun_from"] == "first run", "its cost is not in these numbers"
    assert str(second) in (read_record(entry).command or ""), (
        "the run's folder has the complete command"
    )
