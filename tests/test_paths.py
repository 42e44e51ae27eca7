"""Every door reads paths in the same way, and what a message suggests can be pasted."""

from __future__ import annotations

import ast
import importlib
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import adopt
from drafttrain.checks import pasted
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.export import export_package
from drafttrain.target.model import Target
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
from tests.helpers import save_target
from tests.packaging.made import packed

# --- F89: paths -----------------------------------------------------------------------------------
# The kind: a value that Hydra's grammar has no place for (letters outside ASCII, ~, =, commas, a
# hash, brackets that do not close) or reads in its own way (quotes), while other doors took it
# literally, quotes included. Tried at every door and at each of its settings that is a path, plain
# and in quotes; then the same words as messages suggest them, for a shell, also where the value
# looks like a number, null, a list, a reference or a quoted text, and for values of any characters.

ROOT = Path(__file__).resolve().parent.parent / "drafttrain"
DOORS: dict[str, list[str]] = {
    "fit": ["run_dir", "resume", "init_from", "data.path", "target.path", "features.path"],
    "synthesize": ["out", "target.path", "prompts.path"],
    "capture": ["out", "data.path"],
    "evaluate": ["package", "prompts", "run_dir"],
    "generate": ["package"],
    "tune": ["package", "prompts", "run_dir"],
    "report": ["runs", "prompts", "run_dir"],
    "export": ["package", "out", "check", "against"],
    "adopt": ["head", "out"],
}
GROUPS = {
    "target.path": ["target=hf"],
    "features.path": ["features=store"],
    "data.path": ["data=set"],
    "prompts.path": ["prompts=jsonl"],
}
PLAIN = ["a b/x", "ünï/x", "日本", "~/x", "a=b", "a,b", "it's x", "a#b", "(x)", "{x", "runs/a-1.5"]
AS_NO_TEXT = ["2024", "1e3", "null", "true", "[a]", "{a: b}", "", "${oc.env:HOME}", '"a"', "a\\"]


def read(door: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Settings as the door has them."""
    capsys.readouterr()
    groups = [choice for key in words for choice in GROUPS.get(key, [])]
    given = [*groups, *(f"{key}={value}" for key, value in words.items())]
    importlib.import_module(f"drafttrain.{door}").main([*given, "--cfg", "job"])
    config = OmegaConf.create(capsys.readouterr().out)
    raw = OmegaConf.to_container(config)
    found = {}
    for key in words:
        held: Any = raw
        for name in key.split("."):
            held = held[name]
        found[key] = held
    return found


@pytest.mark.field("F89")
@pytest.mark.parametrize("door", DOORS)
def test_every_door_reads_paths_in_the_same_way(
    door: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, start = DOORS[door], sorted(DOORS).index(door)
    paths = {key: PLAIN[(start + i) % len(PLAIN)] for i, key in enumerate(keys)}
    assert read(door, paths, capsys) == paths
    assert read(door, {key: f'"{path}"' for key, path in paths.items()}, capsys) == paths
    others = [("'2024'", "2024"), ("2024", 2024), ("null", None), ("${oc.env:A,b}/ü x",) * 2]
    for written, found in others[start % 2 :: 2]:
        assert read(door, dict.fromkeys(keys, written), capsys) == dict.fromkeys(keys, found)


@pytest.mark.parametrize("path", PLAIN)
def test_a_path_needs_no_quotes_and_may_have_them(path: str) -> None:
    for door, key in (("fit", "run_dir"), ("export", "out")):
        for written in (path, f'"{path}"'):
            assert compose(door, [f"{key}={written}"])[key] == path


def test_a_number_for_a_path_is_refused_with_a_word_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for door, key in (("fit", "run_dir"), ("capture", "out"), ("evaluate", "run_dir")):
        main = importlib.import_module(f"drafttrain.{door}").main
        with pytest.raises(SystemExit):
            main([f"{key}=1e3", *({"evaluate": ["package=x"]}.get(door, []))])
        (word,) = shlex.split(capsys.readouterr().err.rpartition("needs quotes: ")[2])
        assert compose(door, [word], check_missing=False)[key] == "1000.0"


@pytest.mark.parametrize("value", [*PLAIN, *AS_NO_TEXT])
def test_a_suggested_word_is_read_as_it_was_meant(value: str) -> None:
    for door, key in (("fit", "run_dir"), ("adopt", "head")):
        (word,) = shlex.split(pasted(key, value))
        assert compose(door, [word], check_missing=False)[key] == value
    (word,) = shlex.split(pasted("data.temperatures", [0.5, value, None, True, 3]))
    assert compose("fit", [word]).data.temperatures == [0.5, value, None, True, 3]


def test_values_of_any_characters_can_be_pasted() -> None:
    chance = random.Random(0)
    letters = "ab/.=~,'\"\\${}[]()# :-_é日0*"
    for _ in range(50):
        values = ["".join(chance.choices(letters, k=chance.randint(1, 9))) for _ in "ab"]
        line = " ".join(map(pasted, ("run_dir", "target.path"), values))
        config = compose("fit", ["target=hf", *shlex.split(line)])
        assert [config.run_dir, config.target.path] == values, line


def test_commands_after_an_adoption_name_odd_folders_so_that_they_work(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "it's ü=1, [x]"
    place.mkdir()
    save_target(target, place / "target")
    packed(place / "package", drafters.make(Eagle1, target), target)
    export_package(place / "package", target, "vllm", place / "head")
    own = ["target=hf", "target.device=cpu", "target.dtype=float32"]
    own += [f"target.path={place}/target", f"head={place}/head", f'out="{place}/adopted"']
    adopt.main(own)
    said = capsys.readouterr().err.splitlines()
    for door, key in (("evaluate", "package"), ("fit", "init_from")):
        command = next(line for line in said if f"drafttrain.{door} " in line)
        words = shlex.split(command.rpartition(f"python -m drafttrain.{door} ")[2])
        config = compose(door, words, check_missing=False)
        assert config[key] == str(place / "adopted")
    assert (place / "adopted" / "config.json").is_file()


def test_no_suggested_command_holds_a_bare_value() -> None:
    """They come from `pasted`."""
    bare = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.JoinedStr):
                continue
            suggests = False
            for one, after in zip(node.values, node.values[1:], strict=False):
                text = str(one.value) if isinstance(one, ast.Constant) else ""
                suggests = suggests or "python -m drafttrain." in text or "resume=last " in text
                if suggests and text.endswith("="):
                    bare.append((path.name, ast.unparse(after)))
    assert bare == []
