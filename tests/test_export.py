"""The door: pairs that no engine serves are refused with what would, nothing is left half-written,
a check is an exit code."""

from __future__ import annotations

import ast
import copy
import json
import os
import pickle
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from drafttrain import export
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.layouts import writing
from drafttrain.layouts.checking import check_path
from drafttrain.layouts.directory import INDEX
from drafttrain.layouts.engines import KNOWN, SGLANG, VLLM, names
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.writing import Exported, check_out
from drafttrain.target.model import Target
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
from tests.helpers import packed_place
from tests.layouts.made import config, put, stirred
from tests.messages import said
from tests.packaging.made import packed


@pytest.fixture(scope="module")
def settings() -> DictConfig:
    return compose("export", text=("package", "out", "check", "against"))


@pytest.fixture(scope="module")
def place(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the target and a package."""
    return packed_place(
        tmp_path_factory.mktemp("export"), target, stirred(drafters.make(Eagle1, target))
    )


def words(place: Path, **settings: Any) -> list[str]:
    given = {
        "target": "hf",
        "target.path": place / "target",
        "target.dtype": "float32",
        "target.device": "cpu",
        **settings,
    }
    return [f"{key}={value}" for key, value in given.items()]


@pytest.fixture(scope="module")
def exported(place: Path, target: Target) -> Path:
    export.export_package(place / "package", target, "vllm", place / "exported")
    return place / "exported"


@pytest.fixture
def head(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "head"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_export_then_check(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "head"
    export.main(words(place, package=place / "package", to="vllm", out=out))
    shown = capsys.readouterr()
    assert (
        shown.out.startswith("vllm serve")
        and str(out) in shown.out
        and '"num_speculative_tokens": 4' in shown.out
    )
    assert "checked" in shown.err
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "drafttrain.json",
        "model.safetensors",
    ]
    assert (
        all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
        and out.stat().st_mode & 0o777 == 0o755
    )
    assert [path.name for path in out.parent.iterdir()] == ["head"]
    export.main([f"check={out}", f"against={place / 'target'}"])
    assert "nothing found" in capsys.readouterr().out
    put("lm_head.weight", 320, 64)(out)
    with pytest.raises(SystemExit) as left:
        export.main([f"check={out}"])
    assert left.value.code == 1 and "head-shipped" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a/b", 'o\'dir "x" [y] \\z $HOME ü', "{target}"])
def test_printed_commands_hold_any_path(name: str) -> None:
    _, _, target, _, saved = shlex.split(
        writing.filled(VLLM.start("eagle", 4, {}), name, "my target")
    )
    assert target == "my target" and json.loads(saved)["model"] == name
    words = shlex.split(
        writing.filled(
            SGLANG.start("EAGLE", 4, {"speculative-token-map": "{out}/x.pt"}), name, "it's"
        )
    )
    assert [words[place] for place in (4, 8, -1)] == ["it's", name, f"{name}/x.pt"]
    for quote in "'", '"':
        call = ast.parse(
            writing.filled(
                f"Model.load({quote}{{target}}{quote}, out={quote}{{out}}{quote})  # x",
                name,
                "it's",
            )
        )
        assert [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)] == [
            "it's",
            name,
        ]


@pytest.mark.parametrize("target", ["org/model", "it's $HOME `id`"])
@pytest.mark.parametrize(
    "command", [VLLM.start("eagle", 4, {}), SGLANG.start("EAGLE", 4, {})], ids=["vllm", "sglang"]
)
def test_a_cards_command_can_be_pasted(command: str, target: str) -> None:
    saved = export.card("Eagle1", target, Exported({}, {}, command), "vllm")
    (line,) = (line for line in saved.splitlines() if line.startswith("    "))
    assert "In this folder:" in saved and line.strip() == writing.filled(command, ".", target)
    found = shlex.split(line, posix=True)
    assert target in found and not any(sign in word for word in found for sign in "<>")


def test_only_warnings_are_no_error(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tie_word_embeddings=True)(head)
    export.show(check_path(head), "head")
    assert "warning" in capsys.readouterr().out


def test_names_of_tensors_do_not_steer_the_terminal(
    head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("fc\x1b[2J\nweight", 1)(head)
    with pytest.raises(SystemExit):
        export.main([f"check={head}"])
    assert "holds fc [2J weight" in (shown := capsys.readouterr().out) and "\x1b" not in shown


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HydraHeads, r"HydraHeads .*custom_generate"),
        (NGram, r'NGram .*vllm serve.*"prompt_lookup_max": 3, "prompt_lookup_min": 1\}'),
        (Suffix, "Suffix .*arctic-inference"),
    ],
)
def test_drafters_that_no_engine_loads(
    kind: Any, message: str, target: Target, tmp_path: Path
) -> None:
    packed(tmp_path / "package", drafters.make(kind, target), target)
    for to in names(KNOWN):
        with pytest.raises(InputError, match=message):
            export.check_pair(tmp_path / "package", to)


def test_an_export_is_no_package(exported: Path) -> None:
    with pytest.raises(InputError, match=r"drafttrain\.adopt head=" + re.escape(str(exported))):
        export.check_pair(exported, "vllm")


@pytest.mark.field("F41")
def test_pairs_that_no_engine_serves(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the target is read."""
    for to in ("medusa", "speculators", "hf"):
        with pytest.raises(InputError, match=f"to={to}: Eagle1 .*to=vllm or to=sglang or to=eagle"):
            export.check_pair(place / "package", to)
    given = words(place, package=place / "package", to="hf", out=tmp_path / "out") + [
        "target.path=/nowhere"
    ]
    with pytest.raises(SystemExit) as left:
        export.main(given)
    assert (
        left.value.code == 2 and "give to=vllm or to=sglang or to=eagle" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_tuned_target_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {**json.loads((place / "package/config.json").read_text()), "adapter": {}}
    monkeypatch.setattr(export, "read_config", lambda folder: saved)
    with pytest.raises(InputError, match=said("doors.export-tuned-target")):
        export.check_pair(place / "package", "vllm")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": None}, "to=<the engine>"),
        ({"to": "vlm"}, "to=vlm: give one of vllm, sglang, eagle, medusa, speculators, hf"),
        ({"package": None}, "package=<folder of a package>"),
        ({"out": None}, "out=<a new folder>"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"vocabulary": "small"}, "vocabulary=small"),
        ({"tokens": 0}, "tokens=0"),
        ({"package": "~nobody-of-that-name/x"}, "package=~nobody-of-that-name/x"),
        ({"out": "~nobody-of-that-name/x"}, "out=~nobody-of-that-name/x"),
        (
            {"package": None, "out": None, "check": "~nobody-of-that-name/x"},
            "check=~nobody-of-that-name/x",
        ),
        ({"against": "somewhere"}, "against is"),
        ({"check": "somewhere"}, "package and out"),
        (
            {"package": None, "out": None, "check": "/nowhere", "to": "speculators"},
            "to=speculators: give one of vllm",
        ),
    ],
)
def test_bad_input(given: dict[str, Any], message: str, place: Path, settings: DictConfig) -> None:
    cfg = copy.deepcopy(settings)
    for key, value in {
        "package": str(place / "package"),
        "to": "vllm",
        "out": "out",
        **given,
    }.items():
        cfg[key] = value
    with pytest.raises(InputError, match=re.escape(message)):
        export.check_settings(cfg)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"package": "/nowhere", "to": "vllm"}, "package=/nowhere"),
        ({"check": "/nowhere"}, "check=/nowhere"),
        ({"tokns": 3}, "tokns. Did you mean tokens"),
    ],
)
def test_bad_input_is_one_line(
    given: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {} if "check" in given else {"out": tmp_path / "out"}
    with pytest.raises(SystemExit) as left:
        export.main([f"{key}={value}" for key, value in {**given, **out}.items()])
    said = capsys.readouterr().err
    assert left.value.code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- the place ------------------------------------------------------------------------------------


def test_an_empty_folder_is_used(place: Path, tmp_path: Path, target: Target) -> None:
    (tmp_path / "out").mkdir()
    export.export_package(place / "package", target, "vllm", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_places_that_are_not_used(
    place: Path, tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = snapshot(tmp_path)
    for out, message in {
        tmp_path / "full": r"^out=.*thesis\.tex",
        tmp_path / "file": "^out=.* file",
        tmp_path / "link": "^out=.* link",
        tmp_path / "file/inside": "^out=",
        Path("."): r"^out=\.",
        place / "package": "^out=",
    }.items():
        with pytest.raises(InputError, match=message):
            export.export_package(place / "package", target, "vllm", out)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("when", ["writing", "checking", "swapping"])
def test_a_failing_write_leaves_the_place_as_it_was(
    when: str,
    there: bool,
    place: Path,
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if when == "writing":
        monkeypatch.setattr(writing, "save_file", full)
    elif when == "checking":
        monkeypatch.setattr(export, "checked", lambda head, source: [Finding("planted", "a fault")])
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises((OSError, InputError), match=r"No space|\[planted\]"):
        export.export_package(place / "package", target, "vllm", out)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
    assert not there or not list(out.iterdir())


@pytest.mark.field("F69")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    os.chmod(tmp_path / "closed", 0o500)
    try:
        if not os.access(tmp_path / "closed", os.W_OK):  # a superuser may write anywhere
            with pytest.raises(InputError, match=r"^out="):
                check_out(tmp_path / "closed" / "out")
    finally:
        os.chmod(tmp_path / "closed", 0o700)


def test_a_place_that_only_says_that_it_takes_folders(
    place: Path,
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As /proc does, for the superuser: one line before the target is read, and none of Python's
    afterwards."""

    def none(above: Path, _: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(above))

    exported = Exported({}, {}, "")
    monkeypatch.setattr(writing, "new_folder", none)
    with pytest.raises(SystemExit) as left:
        export.main(
            words(place, package=place / "package", to="vllm", out=tmp_path / "out")
            + ["target.path=/nowhere"]
        )
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    assert (
        f"out={tmp_path / 'out'} cannot be made: no folder can be made in {tmp_path} (No such file"
        in said
    )
    with pytest.raises(InputError, match=r"^out="):
        writing.put(tmp_path / "out", exported, {}, None, lambda head: [])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^out="):
        writing.put(tmp_path / "file/inside/out", exported, {}, None, lambda head: [])


def test_a_long_name(tmp_path: Path) -> None:
    """The folder next to it, in which it is made, has a shorter one."""
    out = check_out(tmp_path / ("o" * 250))
    writing.put(out, Exported({}, {"fc.weight": torch.ones(1)}, ""), {}, None, lambda head: [])
    assert out.is_dir() and [path.name for path in tmp_path.iterdir()] == [out.name]


# --- what is never trusted ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "config.json").write_text("{"), said("doors.damage-unreadable")),
        (
            lambda p: (p / "config.json").write_text('{"a": 1, "a": 2}'),
            said("doors.damage-key-twice"),
        ),
        (lambda p: (p / "config.json").write_text('{"a": NaN}'), said("doors.damage-no-number")),
        (lambda p: (p / "config.json").write_text("[" * 10**6), said("doors.damage-unreadable")),
        (lambda p: (p / "config.json").write_text("[]"), said("doors.damage-no-mapping")),
        (
            lambda p: (p / "config.json").write_text(" " * (17 << 20)),
            said("doors.damage-too-large"),
        ),
        (lambda p: (p / "config.json").unlink(), "config.json"),
        (
            lambda p: (p / "model.safetensors").write_bytes(b"\x80\x04"),
            said("doors.damage-unreadable"),
        ),
        (lambda p: os.truncate(p / "model.safetensors", 4000), said("doors.damage-unreadable")),
        (
            lambda p: (p / "second.safetensors").write_bytes(
                (p / "model.safetensors").read_bytes()
            ),
            "second.safetensors",
        ),
        (lambda p: in_place_of(p / "config.json", os.mkfifo), "config.json"),
        (lambda p: in_place_of(p / "config.json", Path.mkdir), "config.json"),
        (lambda p: in_place_of(p / "model.safetensors", os.mkfifo), "model.safetensors"),
        (lambda p: in_place_of(p / "model.safetensors", Path.mkdir), "model.safetensors"),
        (
            lambda p: in_place_of(p / "model.safetensors", linked_to("/dev/zero")),
            "model.safetensors",
        ),
        (
            lambda p: in_place_of(p / "model.safetensors", linked_to("model.safetensors")),
            said("doors.damage-unreadable"),
        ),
        (lambda p: os.mkfifo(p / INDEX), "index.json"),
        (lambda p: (p / "drafttrain.json").write_text("{}"), "format"),
        (lambda p: config_of_origin(p, engine="x"), "engine is x"),
        (lambda p: config_of_origin(p, draft_ids=[3, 1]), said("layouts.ids-ascend")),
        (lambda p: config_of_origin(p, draft_ids="all"), said("doors.damage-draft-ids")),
        (lambda p: config_of_origin(p, format=2), "format 2"),
        (lambda p: config_of_origin(p, trained_length=-1), "trained_length is -1"),
        (lambda p: config_of_origin(p, target={}), "target.fingerprint"),
        (lambda p: config_of_origin(p, more=1), "'more'"),
    ],
)
def test_damage_is_refused(damage: Any, message: str, head: Path) -> None:
    damage(head)
    with pytest.raises(InputError, match=re.escape(message)):
        check_path(head)


def in_place_of(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def linked_to(there: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(there)


def config_of_origin(path: Path, **changes: Any) -> None:
    saved = json.loads((path / "drafttrain.json").read_text())
    (path / "drafttrain.json").write_text(json.dumps(saved | changes))


@pytest.mark.field("F67", "F68")
def test_nothing_of_a_directory_is_run(head: Path, tmp_path: Path) -> None:
    """Neither a pickle nor Python code."""

    class Marker:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "marker"), "w"))

    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Marker()}))
    (head / "modeling.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    config(auto_map={"AutoModel": "modeling.Model"})(head)
    assert [finding.name for finding in check_path(head)] == ["pickle-beside-safetensors"]
    (head / "model.safetensors").unlink()
    (found,) = check_path(head)
    assert found.name == "pickled-weights" and "weights_only=True" in found.said
    assert not (tmp_path / "marker").exists()
