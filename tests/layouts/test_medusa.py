"""Medusa's heads for vLLM and in FasterDecoding's layout: there and back bit for bit, computed as
engines do, faults by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.layouts import medusa, origin
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.layouts.made import (
    DROP,
    Edit,
    both,
    config,
    directory,
    drafts,
    drop,
    names,
    put,
    read_back,
    same,
    stirred,
    tensors,
)
from tests.messages import said
from tests.packaging.made import packed

IDS = list(range(1, 201, 2))


def made(target: Target, **settings: Any) -> Medusa:
    return stirred(drafters.make(Medusa, target, **{"heads": 3, **settings}))


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load.tiny()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("vllm", {"own_head": True, "decay": 0.7}),
    "borrowed": ("vllm", {}),
    "borrowed, reduced": ("vllm", {"draft_ids": IDS}),
    "two blocks": ("vllm", {"blocks": 2}),
    "FasterDecoding, own": ("medusa", {"own_head": True}),
    "FasterDecoding, borrowed": ("medusa", {}),
    "FasterDecoding, borrowed, reduced": ("medusa", {"draft_ids": IDS}),
}


@pytest.mark.field("F41")
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, tiny: Target, tmp_path: Path) -> None:
    engine, settings = CASES[case]
    drafter = made(tiny, **settings)
    packed(tmp_path / "package", drafter, tiny)
    export_package(tmp_path / "package", tiny, engine, out := tmp_path / "out")
    tiny.model.save_pretrained(tmp_path / "target")
    assert names(out) == {} == names(out, engine, tmp_path / "target")
    again = read_back(out, tiny)
    assert same(drafter, again) and again.settings() == drafter.settings()
    assert drafts(tiny, drafter) == drafts(tiny, again)
    (out / origin.FILE).unlink()
    foreign = read_back(out, tiny)
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if name != "draft_ids"}
    theirs = foreign.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in kept.items())
    assert foreign.config.own_head == drafter.config.own_head
    assert foreign.choices == 320


@pytest.mark.parametrize("case", CASES)
def test_the_file_computes_what_the_drafter_does(case: str, tiny: Target, tmp_path: Path) -> None:
    """Head j: x + silu(W x + b) for every block, then its projection."""
    engine, settings = CASES[case]
    drafter = made(tiny, **settings)
    packed(tmp_path / "package", drafter, tiny)
    export_package(tmp_path / "package", tiny, engine, tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())
    held = load_file(tmp_path / "out" / ("model.safetensors" if engine == "vllm" else medusa.FILE))
    if engine == "vllm":
        count, blocks, form = saved["num_heads"], saved["num_hidden_layers"], "blocks.{}.layers.{}"
        heads = [
            held["lm_head.weight" if saved["original_lm_head"] else f"lm_heads.{j}.weight"]
            for j in range(count)
        ]
    else:
        count, blocks, form = saved["medusa_num_heads"], saved["medusa_num_layers"], "{}.{}.linear"
        heads = [held[f"{j}.{blocks}.weight"] for j in range(count)]
    assert saved["medusa_fc_bias"] and saved["hidden_size"] == 64
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    for j in range(count):
        x = hidden
        for i in range(blocks):
            name = form.format(j, i)
            x = x + functional.silu(x @ held[f"{name}.weight"].T + held[f"{name}.bias"])
        logits = x @ heads[j].T
        mine = drafter.project(drafter.heads[j](hidden), j + 1)
        if "draft_ids" in settings:
            logits = logits[:, IDS]
        torch.testing.assert_close(mine.detach(), logits, rtol=1e-4, atol=1e-4)


def test_no_key_of_the_target_that_vllm_would_rename(tiny: Target, tmp_path: Path) -> None:
    packed(tmp_path / "package", made(tiny), tiny)
    found = export_package(tmp_path / "package", tiny, "vllm", tmp_path / "out", tokens=2)
    saved = json.loads((tmp_path / "out/config.json").read_text())
    assert [key for key in saved if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert saved["model_type"] == "medusa" and saved["architectures"] == ["MedusaModel"]
    assert '"num_speculative_tokens": 2' in found.command and '"method": "medusa"' in found.command
    with pytest.raises(InputError, match=r"tokens=4: .* 3"):
        export_package(tmp_path / "package", tiny, "vllm", tmp_path / "no", tokens=4)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"blocks": 2}, {"engine": "medusa"}, r"^to=medusa: .* 2 blocks .*to=vllm"),
        ({"own_head": True, "draft_ids": IDS}, {"engine": "medusa"}, r"^to=medusa: .* 100 of 320"),
        (
            {"own_head": True, "draft_ids": IDS},
            {"engine": "vllm"},
            r"^to=vllm: .* 100.*draft_vocab=0",
        ),
        (
            {"own_head": True, "draft_ids": IDS},
            {"engine": "vllm", "vocabulary": "whole"},
            "^to=vllm: .* 100 of 320",
        ),
        ({"draft_ids": IDS}, {"engine": "medusa", "vocabulary": "reduced"}, "vocabulary=reduced"),
        ({"draft_ids": IDS}, {"engine": "vllm", "vocabulary": "reduced"}, "vocabulary=reduced"),
        ({}, {"engine": "sglang"}, r"^to=sglang: Medusa .* to=vllm or to=medusa"),
        ({}, {"engine": "speculators"}, r"^to=speculators: Medusa .* to=vllm or to=medusa"),
    ],
)
def test_heads_that_a_layout_cannot_hold(
    settings: dict[str, Any], options: dict[str, Any], message: str, tiny: Target, tmp_path: Path
) -> None:
    packed(tmp_path / "package", made(tiny, **settings), tiny)
    with pytest.raises(InputError, match=message):
        export_package(
            tmp_path / "package", tiny, options.pop("engine"), tmp_path / "out", **options
        )
    assert not (tmp_path / "out").exists()


def test_the_target_is_named_without_its_folder(tiny: Target, tmp_path: Path) -> None:
    target = Target(tiny.model, None, str(tmp_path / "the target"))
    packed(tmp_path / "package", made(target), target)
    export_package(tmp_path / "package", target, "medusa", out := tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == "the target"
    assert not [
        path
        for path in out.rglob("*")
        if path.is_file() and str(tmp_path).encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("engine", ["vllm", "medusa"])
def test_heads_that_borrow_propose_from_the_full_vocabulary(
    engine: str, tiny: Target, tmp_path: Path
) -> None:
    """vLLM 0.32 has code for a reduced one, but its loader stops at the map."""
    packed(tmp_path / "package", made(tiny, draft_ids=IDS), tiny)
    found = export_package(tmp_path / "package", tiny, engine, tmp_path / "out")
    assert "drafts from 100 tokens, these heads from all" in found.notes[0]
    assert read_back(tmp_path / "out", tiny).choices == 100, "drafttrain's own word for it"
    export_package(
        tmp_path / "package", tiny, "vllm", out := tmp_path / "whole", vocabulary="whole"
    )
    held = load_file(out / "model.safetensors")
    assert held["lm_head.weight"].shape == (320, 64) and "token_map" not in held
    assert names(out) == {} and read_back(out, tiny).choices == 320


# --- faults ---------------------------------------------------------------------------------------

BIASES = [f"blocks.{j}.layers.0.bias" for j in range(3)]
FAULTS: dict[str, tuple[str, Edit, str]] = {
    "biases dropped": ("own", config(medusa_fc_bias=DROP), "medusa-biases-dropped"),
    "biases promised": (
        "own", tensors(lambda t: [t.pop(name) for name in BIASES]), "tensor-missing",
    ),
    "a model type that is none": ("own", config(model_type=None), "config-value"),
    "a dtype that is none": ("own", config(dtype="bf16"), "config-value"),
    "positions beyond all": ("own", config(max_position_embeddings=1e308), "config-value"),
    "renamed keys": ("own", config(num_attention_heads=4), "medusa-renamed-keys"),
    "no width": ("own", config(hidden_size=DROP), "medusa-hidden-size"),
    "more heads than there are": ("own", config(num_heads=4), "tensor-missing"),
    "no head": ("borrowed", drop("lm_head.weight"), "tensor-missing"),
    "shape": ("own", put("lm_heads.1.weight", 319, 64), "tensor-shape"),
    "NaN": ("own", put("blocks.0.layers.0.weight", 64, 64, value=float("nan")), "not-finite"),
    "no token map": ("reduced", drop("token_map"), "token-map-missing"),
    "token map twice": ("reduced", tensors(lambda t: t["token_map"].fill_(3)), "token-map-ids"),
    "token map beyond": (
        "reduced", tensors(lambda t: t["token_map"][-1:].fill_(320)), "token-map-ids",
    ),
    "token map of another size": ("reduced", config(truncated_vocab_size=99), "token-map-not-read"),
    "vocabulary": ("own", config(vocab_size=330), "vocabulary-size"),
    "width": ("own", config(hidden_size=32), "width-differs"),
    "quantised": ("own", config(quantization_config={"bits": 4}), "quantised-config"),
    "a stale head": ("borrowed", put("lm_head.weight", 320, 64), "head-differs"),
    "vLLM's names": (
        "own", both(config(medusa_num_heads=3), config(num_heads=DROP, num_hidden_layers=DROP)),
        "medusa-layout",
    ),
    "no count": ("own", config(num_heads=DROP), "config-key-missing"),
}  # fmt: skip


FOUND = {"own": {}, "borrowed": {}, "reduced": {"token-map-not-loaded": True}}


def reduce(path: Path) -> None:
    """A reduced vocabulary as vLLM's code has it, which its loader does not let through."""

    def cut(held: dict[str, torch.Tensor]) -> None:
        held.update({f"lm_heads.{j}.weight": held[f"lm_heads.{j}.weight"][IDS] for j in range(3)})
        held["token_map"] = torch.tensor(IDS)

    both(tensors(cut), config(truncated_vocab_size=100))(path)


@pytest.fixture(scope="module")
def good(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for name, settings in {"own": {"own_head": True}, "borrowed": {}}.items():
        packed(folder / "package", made(tiny, **settings), tiny)
        export_package(folder / "package", tiny, "vllm", folder / name)
        (folder / name / origin.FILE).unlink()
    shutil.copytree(folder / "own", folder / "reduced")
    reduce(folder / "reduced")
    tiny.model.save_pretrained(folder / "target")
    return folder


@pytest.mark.field("F41")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_by_name(fault: str, good: Path, tmp_path: Path) -> None:
    kind, edit, name = FAULTS[fault]
    path = Path(shutil.copytree(good / kind, tmp_path / "head"))
    engine = "medusa" if name == "medusa-layout" else "vllm"
    assert names(path, "vllm", good / "target") == FOUND[kind]
    edit(path)
    assert names(path, engine, good / "target").get(name) is True


def shared_blocks(path: Path, tiny: Target, *, equal: bool) -> Path:
    drafter = made(tiny, blocks=2)
    held = {}
    for j, head in enumerate(drafter.heads):
        for i, block in enumerate(head):
            linear = head[0].linear if equal else block.linear
            held |= {
                f"{j}.{i}.linear.{name}": p.detach().clone()
                for name, p in linear.named_parameters()
            }
        held[f"{j}.2.weight"] = torch.ones(320, 64)
    return directory(
        path, {"medusa_num_heads": 3, "medusa_num_layers": 2, "vocab_size": 320}, held, medusa.FILE
    )


def test_blocks_that_fasterdecoding_shares(tiny: Target, tmp_path: Path) -> None:
    assert names(shared_blocks(tmp_path / "a", tiny, equal=False)) == {"medusa-shared-blocks": True}
    assert names(shared_blocks(tmp_path / "b", tiny, equal=True)) == {}
    read = read_back(tmp_path / "b", tiny)
    assert read.config.blocks == 2 and torch.equal(
        read.heads[1][0].linear.weight, read.heads[1][1].linear.weight
    )
    packed(tmp_path / "package", read, tiny)
    export_package(tmp_path / "package", tiny, "medusa", tmp_path / "out")


# --- foreign heads --------------------------------------------------------------------------------


def test_a_token_map_in_any_order(good: Path, tiny: Target, tmp_path: Path) -> None:
    """Engines list tokens by their frequency: ids are sorted, and the rows of every head with
    them."""
    path = Path(shutil.copytree(good / "reduced", tmp_path / "head"))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(4))

    def shuffle(held: dict[str, torch.Tensor]) -> None:
        for name in ("token_map", *(f"lm_heads.{j}.weight" for j in range(3))):
            held[name] = held[name][order]

    tensors(shuffle)(path)
    assert names(path, "vllm") == FOUND["reduced"]
    assert same(read_back(path, tiny), read_back(good / "reduced", tiny))


def test_heads_without_biases_and_with_one_trained_projection(
    good: Path, tiny: Target, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good / "borrowed", tmp_path / "head"))
    shared = torch.randn(320, 64, generator=torch.Generator().manual_seed(5))
    tensors(lambda t: [t.pop(name) for name in BIASES])(path)
    tensors(lambda t: t.update({"lm_head.weight": shared}))(path)
    config(medusa_fc_bias=DROP)(path)
    assert names(path, "vllm") == {}
    read = read_back(path, tiny)
    assert read.config.own_head and all(torch.equal(weight, shared) for weight in read.projections)
    assert not any(bool(head[0].linear.bias.any()) for head in read.heads)


def test_speculators_offsets_become_ids(good: Path, tiny: Target, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good / "reduced", tmp_path / "head"))
    offsets = torch.tensor(IDS) - torch.arange(100)
    tensors(lambda t: [t.pop("token_map"), t.update(d2t=offsets)])(path)
    assert same(read_back(path, tiny), read_back(good / "reduced", tiny))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("blocks.1.layers.0.weight"), r"blocks\.1\.layers\.0\.weight"),
        (put("blocks.1.layers.0.weight", 64, 32), r"\[64, 32\], .*\[64, 64\]"),
        (drop("lm_heads.1.weight"), said("layouts.heads-missing")),
        (put("stranger", 3), "stranger"),
        (put("lm_heads.0.weight", 321, 64), r"\[321, 64\], .*\[320, 64\]"),
        (put("lm_heads.0.weight", 320, 64, value=float("nan")), said("layouts.not-finite")),
        (tensors(lambda t: t.update(token_map=torch.tensor([3, 3]))), said("layouts.ids-twice")),
        (
            tensors(lambda t: t.update(token_map=torch.zeros(2, 2, dtype=torch.int64))),
            "token_map is int64",
        ),
    ],
)
def test_heads_that_cannot_be_taken_over(
    edit: Edit, message: str, good: Path, tiny: Target, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good / "own", tmp_path / "head"))
    edit(path)
    with pytest.raises(InputError, match=message):
        read_back(path, tiny)
