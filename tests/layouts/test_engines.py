"""Engines as records: a new engine is one record, a new layout is one file, and nothing else."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafttrain import layouts
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.mtp import Mtp
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.export import check_pair, export_package
from drafttrain.layouts import engines, pairs
from drafttrain.layouts.directory import open_directory
from drafttrain.layouts.engines import Engine, Like
from drafttrain.layouts.layout import known
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.layouts.foreign import ROPE, H, V
from tests.layouts.made import drafts, names, put, read_back, same, stirred
from tests.messages import said
from tests.packaging.made import packed

LOADS: dict[type[Drafter], tuple[str, ...]] = {
    Eagle1: ("vllm", "sglang", "eagle"),
    Eagle3: ("vllm", "sglang", "eagle", "speculators"),
    Medusa: ("vllm", "medusa"),
    Mtp: ("vllm", "target"),
    Ssm: ("vllm", "sglang", "hf"),
}


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load.tiny()


@pytest.mark.parametrize("engine", engines.KNOWN, ids=str)
def test_a_record_says_how_its_engine_is_started_and_where_that_was_read(engine: Engine) -> None:
    command = engine.start("method", 3, {})
    assert engine.source and engine.title and "{out}" in command
    assert engines.in_a_shell(command) == (engine.program is not None)
    if engine.program is None:
        ast.parse(command.replace("{out}", "x").replace("{target}", "y"))
    else:
        assert shlex.split(command)[0] == engine.program
    assert engines.named(engine.name) is engine and str(engine) == engine.name
    assert engine.reader in engines.readers()


def test_each_pair_is_declared_in_one_place() -> None:
    found = known()
    assert len({layout.name for layout in found}) == len({layout.turn for layout in found})
    for layout in found:
        assert layout.engines() and set(layout.engines()) <= set(engines.KNOWN)
        assert not [engine for engine in layout.readings if layout.name in engine.loads]
        assert (layout.write is None) == (layout.read is None) == (not layout.drafters)
    for engine in engines.KNOWN:
        assert engine.loads.keys() <= {layout.name for layout in found}


def test_which_engines_load_which_drafters() -> None:
    found = {
        kind: engines.names(pairs.engines_of(kind))
        for layout in pairs.written()
        for kind in layout.drafters
    }
    assert found == LOADS
    assert pairs.targets() == ("vllm", "sglang", "eagle", "medusa", "speculators", "hf", "target")


@pytest.mark.parametrize("kind", [kind for kind in LOADS if kind is not Eagle3])
def test_what_the_library_speculators_cannot_hold(kind: Any, tiny: Target, tmp_path: Path) -> None:
    """Its version 0.9.0 has no model of these, so there is nothing to write for it."""
    more = {"layers": [0]} if kind is Ssm else {}
    packed(tmp_path / "package", drafters.make(kind, tiny, **more), tiny)
    with pytest.raises(InputError, match=rf"^to=speculators: {kind.__name__} .*to=vllm"):
        check_pair(tmp_path / "package", "speculators")


# --- a new engine ---------------------------------------------------------------------------------


def start(method: str, tokens: int, settings: Any) -> str:
    return f"newcomer {{target}} --draft {{out}} --{method} {tokens}"


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that reads EAGLE-1 heads nearly as SGLang does, and Medusa's as vLLM does."""
    record = Engine(
        name="newcomer",
        title="Newcomer",
        source="this test",
        start=start,
        program="newcomer",
        loads={
            "eagle1": Like("sglang", {"architectures": ("Newcomer",), "suffix": "", "qwen2": ""}),
            "medusa": Like("vllm"),
        },
    )
    monkeypatch.setattr(engines, "KNOWN", (*engines.KNOWN, record))
    return record


def test_a_new_engine_is_one_record(newcomer: Engine, tiny: Target, tmp_path: Path) -> None:
    drafter = stirred(drafters.make(Eagle1, tiny))
    packed(tmp_path / "package", drafter, tiny)
    found = export_package(tmp_path / "package", tiny, "newcomer", out := tmp_path / "out")
    saved = json.loads((out / "config.json").read_text())
    assert saved["architectures"] == ["Newcomer"]
    assert "fc.bias" in load_file(out / "model.safetensors")
    assert found.command.split()[0] == "newcomer" and str(out) in shlex.split(found.command)
    assert names(out) == {} == names(out, "newcomer")
    assert names(out, "sglang") == {"architecture": True}
    assert same(drafter, again := read_back(out, tiny))
    assert drafts(tiny, drafter) == drafts(tiny, again)
    packed(tmp_path / "medusa", stirred(drafters.make(Medusa, tiny, heads=2)), tiny)
    export_package(tmp_path / "medusa", tiny, "newcomer", tmp_path / "heads")
    assert names(tmp_path / "heads") == {}
    packed(tmp_path / "ssm", drafters.make(Ssm, tiny, layers=[0]), tiny)
    with pytest.raises(InputError, match=r"^to=newcomer: Ssm .*to=vllm or to=sglang or to=hf$"):
        check_pair(tmp_path / "ssm", "newcomer")
    assert pairs.targets()[-1] == "newcomer"
    with pytest.raises(InputError, match="newcomer"):
        check_pair(tmp_path / "package", "nobody")


# --- a new layout ---------------------------------------------------------------------------------

LAYOUT = '''"""Hydra's heads, as no engine reads them."""

from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.layouts import engines
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.directory import INDEX
from drafttrain.wiring.defaults import with_defaults
from drafttrain.files import json_text
from drafttrain.layouts.writing import Exported, stored

READINGS = {engines.VLLM: Reading(method="hydra", settings={"parallel_drafting": True})}


def recognises(head):
    return head.config.get("model_type") == "hydra"


def check(inspection):
    inspection.files()
    expected = {name: tuple(shape) for name, shape in inspection.config["shapes"].items()}
    inspection.compare(expected)
    inspection.weights()


def write(source):
    tensors = stored(dict(source.drafter.state_dict()), source.dtype)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    config = {"model_type": "hydra", "shapes": shapes}
    first = {name: tensors.pop(name) for name in list(tensors)[:1]}
    shards = {"second.safetensors": tensors}
    index = dict.fromkeys(tensors, "second.safetensors") | dict.fromkeys(first, "model.safetensors")
    texts = {INDEX: json_text({"weight_map": index})}
    return Exported(config, first, source.command(), texts=texts, shards=shards)


def read(head, target, known):
    drafter = with_defaults(HydraHeads, target, **known)
    state = drafter.state_dict()
    drafter.load_state_dict({n: head.weight(n, tuple(t.shape)) for n, t in state.items()})
    return drafter.eval()


LAYOUT = Layout(
    name="hydra",
    what="Hydra heads",
    turn=5,
    readings=READINGS,
    recognises=recognises,
    check=check,
    drafters=(HydraHeads,),
    write=write,
    read=read,
)
'''


def test_a_new_layout_is_one_file(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path / "package", drafter := stirred(drafters.make(HydraHeads, tiny)), tiny)
    with pytest.raises(InputError, match=said("layouts.no-engine")):
        check_pair(tmp_path / "package", "vllm")
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts/hydra_of_a_test.py").write_text(LAYOUT)
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path / "layouts")])
    found = export_package(tmp_path / "package", tiny, "vllm", out := tmp_path / "out", tokens=2)
    assert '"method": "hydra"' in found.command and '"parallel_drafting": true' in found.command
    assert names(out) == {} and same(drafter, read_back(out, tiny))
    assert (out / "second.safetensors").is_file()
    put("stranger", 2)(out)
    assert names(out) == {"tensor-unknown": True}
    with pytest.raises(InputError, match=r"^to=sglang: HydraHeads .*to=vllm$"):
        check_pair(tmp_path / "package", "sglang")


SPECULATORS_LAYOUT = '''"""A drafter for the library speculators: a directory of type peagle."""

import json
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.layouts import engines
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.writing import Exported
from tests.layouts.foreign import make_speculators


def write(source):
    with tempfile.TemporaryDirectory() as place:
        path = make_speculators(Path(place) / "made", "peagle")
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
    tensors["embed_tokens.weight"] = source.target.embedding.weight.detach().clone()
    return Exported(config, tensors, source.command())


LAYOUT = Layout(
    name="other",
    what="other heads",
    turn=6,
    readings={engines.SPECULATORS: Reading()},
    recognises=lambda head: False,
    check=lambda inspection: None,
    drafters=(HydraHeads,),
    write=write,
    read=lambda head, target, known: drafters.make(HydraHeads, target),
    speculators=("peagle",),
)
'''


def test_a_directory_of_the_library_speculators_can_be_written_by_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered once a layout writes it, checked as vLLM reads it, and taken over by type."""
    sizes: dict[str, Any] = {"vocab_size": V, "width": H, "layers": 8}
    target = load.tiny(
        rope_parameters=ROPE["rope_parameters"], max_position_embeddings=128, **sizes
    )
    packed(tmp_path / "package", drafters.make(HydraHeads, target), target)
    packed(tmp_path / "turned", drafters.make(HydraHeads, load.tiny(**sizes)), load.tiny(**sizes))
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts/other_of_a_test.py").write_text(SPECULATORS_LAYOUT)
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path / "layouts")])
    assert "speculators" in pairs.targets()
    with pytest.raises(InputError, match=r"\[rope-differs-from-target\]"):
        export_package(tmp_path / "turned", load.tiny(**sizes), "speculators", tmp_path / "no")
    assert not (tmp_path / "no").exists()
    found = export_package(tmp_path / "package", target, "speculators", out := tmp_path / "out")
    assert found.command == f"vllm serve {out}"
    assert names(out) == {} == names(out, "vllm")
    head = open_directory(out, "head")
    assert pairs.reader_of(head)[0] is HydraHeads
    (out / "drafttrain.json").unlink()
    assert names(out) == {}
