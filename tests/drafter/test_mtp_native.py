"""Heads that targets are shipped with: read from their own files, computed as transformers does,
driven to any depth, trained further or anew, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.mtp import Mtp
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.native import NativeModule
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load, native
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.decoding.models import p_value
from tests.drafter import make as drafters
from tests.drafter import native as targets
from tests.drafter.contract import TREES
from tests.drafter.test_mtp import chained, features, text
from tests.layouts.made import tensors
from tests.packaging.made import packed

PROMPTS = [[3, 5, 7, 9, 11], [20, 21]]
FAMILIES = sorted(targets.FAMILIES)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("released")
    return {family: targets.loaded(targets.shipped(folder / family, family)) for family in FAMILIES}


def shipped(target: Target, **settings: Any) -> Mtp:
    return drafters.make(Mtp, target, native="shipped", **settings).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_text_at_any_depth(family: str, released: dict[str, Target]) -> None:
    target = released[family]
    drafter = shipped(target)
    limits: Any = {"max_new_tokens": 10, "stop_ids": ()}
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), **limits)
    for tree in (Tree.chain(6), Tree.expansion([2, 2, 1]), TREES["dynamic"]):
        found, _ = decode(target, drafter, PROMPTS, Plan(tree), **limits)
        assert [one.ids for one in found] == [one.ids for one in plain]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_reproduces_drafting_row_by_row(family: str, released: dict[str, Target]) -> None:
    """Every step, and it reaches all of the head's weights that are reached at all."""
    target = released[family]
    drafter = shipped(target)
    batch = text()
    true = features(target, batch)
    with torch.no_grad():
        outs = drafter.unrolled(batch, true)
        for b, ids in enumerate(batch.input_ids):
            for i in range(len(ids) - 2):
                hidden = true.last_hidden[b : b + 1]
                alone = chained(drafter, hidden, ids[None], i, 3, False)
                for step, out in enumerate(alone[: len(ids) - 2 - i]):
                    torch.testing.assert_close(outs[step][b, i], out, rtol=1e-4, atol=1e-4)
    drafter.requires_grad_(True).loss(batch, true).total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_computes_the_same(family: str, tmp_path: Path) -> None:
    """Its own class for such heads, which finds those of released sizes only."""
    target = targets.loaded(targets.shipped(tmp_path / "t", family))
    drafter = shipped(target)
    theirs = MtpModel(target.model, 1).eval()
    own = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "join": "eh_proj",
        "norm": "post_norm",
    }
    state = drafter.native.state_dict()
    for name in list(state):
        first, _, rest = name.partition(".")
        state[f"layers.0.{own.get(first, 'mtp_block')}.{rest}"] = state.pop(name)
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    hidden = target.features(ids, torch.tensor([9]), Needs(last_hidden=True)).last_hidden
    places = torch.arange(8)[None]
    with torch.inference_mode():
        mine = drafter(hidden[:, :-1], ids[:, 1:], places)
        other = theirs.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_the_order_of_inputs_is_the_familys(released: dict[str, Target]) -> None:
    """Written out: MiMo has the hidden state first, and no embedding in its first row."""
    for family in ("mimo", "qwen3_5"):
        target = released[family]
        module = shipped(target).native
        assert isinstance(module, NativeModule)
        seen: list[torch.Tensor] = []
        handle = module.join.register_forward_pre_hook(
            lambda _m, given, to=seen: to.append(given[0])
        )
        x, embedded = torch.randn(1, 2, 32), torch.randn(1, 2, 32)
        places = torch.arange(2)[None]
        module(x, embedded, places, target.base.rotary_emb(x, position_ids=places))
        handle.remove()
        e, h = module.embedding_norm(embedded), module.hidden_norm(x)
        if family == "mimo":
            e[:, 0] = 0
        parts = (h, e) if family == "mimo" else (e, h)
        torch.testing.assert_close(seen[0], torch.cat(parts, -1))


def test_norms_of_qwen_are_zero_centred(released: dict[str, Target]) -> None:
    """A gain is 1 + w there: weights are taken over as they are."""
    module = drafters.make(Mtp, released["qwen3_next"], native="new").native
    assert module is not None
    assert not module.norm.weight.any() and not module.hidden_norm.weight.any()


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_sampled_text_has_the_targets_distribution(family: str, tmp_path: Path) -> None:
    kind, settings = targets.FAMILIES[family]
    small = {**settings, "vocab_size": 8}
    targets.FAMILIES["small"] = kind, small
    try:
        folder = targets.saved(tmp_path / "t", "small")
    finally:
        del targets.FAMILIES["small"]
    if family == "mimo":
        said = json.loads((folder / "config.json").read_text())
        said["architectures"] = ["MiMoForCausalLM"]
        (folder / "config.json").write_text(json.dumps(said))
    target = targets.loaded(folder)
    drafter = drafters.make(Mtp, target, native="new").eval()
    for tree in (Tree.chain(2), Tree.expansion([2, 2])):
        assert p_value(target, drafter, Plan(tree, Policy(1.0)), rows=2000) > 1e-3


def test_a_package_holds_the_head(tmp_path: Path, released: dict[str, Target]) -> None:
    """Also for the target that lost its own: the files are not asked again."""
    drafter = shipped(released["glm4_moe"])
    assert drafter.settings()["native"] == "new"
    package = packed(tmp_path / "package", drafter, drafter.target, dtype="float32")
    lost = targets.loaded(targets.saved(tmp_path / "lost", "glm4_moe"))
    again = load_drafter(package, lost)
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    copy = drafter.at(torch.float64)
    assert torch.equal(copy.native.join.weight.float(), drafter.native.join.weight)


# What is refused ----------------------------------------------------------------------------------
def test_a_target_of_another_family() -> None:
    with pytest.raises(InputError, match=r"of no family with MTP heads .*\(DeepSeek-V3, .*MiMo\)"):
        drafters.make(Mtp, load.tiny(), native="shipped")
    with pytest.raises(InputError, match="native=mine: give shipped, new or null"):
        drafters.make(Mtp, load.tiny(), native="mine")


def test_a_target_without_a_head(tmp_path: Path) -> None:
    target = targets.loaded(targets.saved(tmp_path / "t", "qwen3_5"))
    assert not native.ships(target)
    with pytest.raises(InputError, match=r"t holds no MTP head \(.* mtp\.\*\): .*native=new"):
        shipped(target)
    drafters.make(Mtp, target, native="new")


def test_a_target_that_was_not_read_from_files(released: dict[str, Target]) -> None:
    model = released["mimo"].model
    config = model.config
    before, config._name_or_path = config._name_or_path, ""
    try:
        with pytest.raises(InputError, match="not read from files"):
            shipped(Target(model, None, "made here"))
    finally:
        config._name_or_path = before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("mtp.fc.weight"), r"1 tensors are lost, such as mtp\.fc\.weight"),
        (lambda t: t.update({"mtp.more.weight": torch.zeros(2)}), r"such as mtp\.more\.weight"),
        (
            lambda t: t.update({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2)}),
            "a single module",
        ),
        (lambda t: t.update({"mtp.fc.weight": torch.zeros(32, 32)}), r"is \[32, 32\], needs"),
        (lambda t: t["mtp.fc.weight"].fill_(float("nan")), "NaN or infinite"),
        (
            lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].to(torch.float8_e4m3fn)}),
            "is float8_e4m3fn: quantised",
        ),
    ],
)
def test_damaged_heads(edit: Any, message: str, tmp_path: Path) -> None:
    folder = targets.shipped(tmp_path / "t", "qwen3_5")
    target = targets.loaded(folder)
    tensors(edit)(folder)
    with pytest.raises(InputError, match=message):
        shipped(target)


def test_a_head_with_a_projection_of_its_own(tmp_path: Path) -> None:
    folder = targets.shipped(tmp_path / "t", "glm4_moe")
    target = targets.loaded(folder)
    held = load_file(folder / "model.safetensors")
    held["model.layers.2.shared_head.head.weight"] += 1
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"shared_head\.head\.weight is not the target's own"):
        shipped(target)
