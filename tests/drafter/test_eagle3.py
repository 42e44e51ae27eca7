"""EAGLE-3: training-time test against chain inference and a plain loop over steps, its parts, the
layers it reads, bad settings, and an overfitted sample.

Neighbours that were thought of: one layer and two, 1 tap, 3 and 5, norms of 3.1 on and off, q/k
norms, grouped heads, joined rows, rows too short for a step, labels outside the draft vocabulary,
heads with biases, scales and soft caps, final norms that add 1, targets of few layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.data.joining import join
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.eagle3 import Eagle3, default_taps
from drafttrain.drafter.vocabulary import most_frequent
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.nn.losses import soft_cross_entropy
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.target.stored import StoredFeatures
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter import make as drafters
from tests.families import model_of, target_of
from tests.target.stores import make_store, random_set

FLAGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"layers": 2, "qk_norm": True, "norm_before_residual": True},
    "five taps": {"taps": [0, 1, 3, 4, 6], "fc_norm": True, "heads": 4, "kv_heads": 1},
}


def make(**settings: Any) -> Eagle3:
    """A drafter for 8 layers whose norms and heads are not where training starts."""
    target = load.tiny(layers=8)
    torch.manual_seed(0)
    drafter = drafters.make(Eagle3, target, **settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
    return drafter


def rows_of(*lengths: int) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randint(3, 250, (n,), generator=generator), torch.arange(n) >= min(3, n - 1), i)
        for i, n in enumerate(lengths)
    ]


def features_of(drafter: Eagle3, batch: Batch) -> Features:
    target = drafter.target
    if batch.packing is not None:
        target.choose_isolation()
    return target.features(batch.input_ids, batch.lengths, drafter.needs, batch.packing)


def naive(drafter: Eagle3, ids: Tensor, layers: dict[int, Tensor]) -> dict[tuple[int, int], Tensor]:
    """{(row, step): (d) what the head reads}: every chain by itself, all it has read so far in one
    causal pass."""
    found = {}
    fused = drafter.fuse(layers)
    for row in range(ids.shape[1] - 2):
        hidden = fused[:, : row + 1]
        for step in range(drafter.config.steps):
            end = row + 1 + step
            if end + 1 >= ids.shape[1]:
                break
            out, fed = drafter(hidden, ids[:, 1 : end + 1], torch.arange(end)[None])
            found[row, step] = out[0, -1]
            hidden = torch.cat((hidden, fed[:, -1:]), 1)
    return found


# Training-time test -------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", FLAGS)
def test_a_training_row_equals_chain_inference_in_float64(flags: str) -> None:
    """What decoding computes at depth j + 1 after a prefix of i + 2 tokens."""
    drafter = make(steps=4, **FLAGS[flags]).double()
    batch = collate([(torch.arange(10, 21), torch.ones(11, dtype=torch.bool), 0)])
    x = batch.input_ids
    layers = {tap: value.double() for tap, value in features_of(drafter, batch).layers.items()}
    with torch.inference_mode():
        read, labels = drafter.aligned(batch, Features(None, layers))
        place, valid = labels.where[1], labels.valid
        found = {
            (int(at) - 2 - step, step): read[t, step]
            for t, at in enumerate(place)
            for step in range(4)
            if valid[t, step]
        }
        assert len(found) == 9 + 8 + 7 + 6
        for row in range(9):
            state = drafter.open(1, 32)
            true = Features(None, {tap: value[:, : row + 1] for tap, value in layers.items()})
            committed = Committed(true, x[:, 1 : row + 2], torch.tensor([row + 1]))
            hidden, candidates = drafter.extend(state, committed, 4)
            for step in range(4):
                if (row, step) in found:
                    logits = drafter.logits(found[row, step])
                    assert float((candidates.logits[0, 0] - logits).abs().max()) < 1e-10
                if row + 2 + step >= 11:
                    break
                token, mask = x[:, row + 2 + step][None], torch.ones(1, 1, step + 1).bool()
                hidden, candidates = drafter.expand(state, token, hidden, step + 1, mask)


@pytest.mark.parametrize("flags", FLAGS)
def test_loss_and_gradients_are_those_of_a_plain_loop_over_rows_and_steps(flags: str) -> None:
    """With soft labels p_{i+1+j}, the mask of the label x_{i+2+j}, and a decay by step."""
    drafter = make(steps=3, step_decay=0.5, chunk=4, **FLAGS[flags]).double()
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    rows = rows_of(7, 4, 6, 2)  # joined: the first two, the others
    expected, count, hits = torch.zeros((), dtype=torch.float64), 0, [0, 0, 0]
    for ids, mask, _ in rows:
        batch = collate([(ids, mask, 0)])
        true = features_of(drafter, batch)
        assert true.last_hidden is not None
        p = drafter.head(true.last_hidden[0].double()).float()
        layers = {tap: value.double() for tap, value in true.layers.items()}
        for (row, step), out in naive(drafter, batch.input_ids, layers).items():
            if mask[row + 2 + step]:
                logits = drafter.logits(out)[None].float()
                value = soft_cross_entropy(logits, p[row + 1 + step][None])
                expected = expected + 0.5**step * value.double().sum()
                count += step == 0
                hits[step] += int(logits.argmax()) == int(ids[row + 2 + step])
    slopes = torch.autograd.grad(expected, parameters)
    for batch in (collate(rows), join(rows, 12)):
        true = features_of(drafter, batch)
        loss = drafter.loss(batch, true)
        torch.testing.assert_close(loss.total.double(), expected, rtol=1e-5, atol=1e-5)
        assert int(loss.count) == count
        names = ("accuracy", "accuracy_2", "accuracy_3")
        assert [int(loss.parts[name][0]) for name in names] == hits
        found = torch.autograd.grad(loss.total, parameters)
        for mine, theirs in zip(found, slopes, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_guesses_at_every_depth_are_those_of_a_plain_loop() -> None:
    drafter = make(steps=3)
    batch = collate(rows_of(9))
    true, ids = features_of(drafter, batch), batch.input_ids
    found = drafter.guesses(batch, true)
    expected = torch.full((1, 9, 3), -1)
    with torch.no_grad():
        for (row, step), out in naive(drafter, ids, true.layers).items():
            if batch.loss_mask[0, row + 2 + step]:
                expected[0, row + 2 + step, step] = drafter.logits(out).argmax()
    assert torch.equal(found, expected) and int((found >= 0).sum()) == 6 + 6 + 5


# F12's kind: rows that end before a label, or before a step reaches one.
@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_rows_too_short_to_teach_count_nothing(length: int) -> None:
    drafter = make(steps=4)
    batch = collate([(torch.arange(4, 4 + length), torch.ones(length, dtype=torch.bool), 0)])
    true = features_of(drafter, batch)
    loss = drafter.loss(batch, true)
    loss.total.backward()
    assert int(loss.count) == (1 if length > 2 else 0) and bool(loss.total.isfinite())
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in drafter.parameters())
    assert bool((drafter.guesses(batch, true)[:, :, 1:] == -1).all())


@pytest.mark.field("F17")
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        {"soft_cross_entropy": 0.1, "total_variation": 0.9},
        {"acceptance_log": 1.0},
        {"forward_kl": 1.0},
        {"cross_entropy": 1.0},
    ],
    ids=str,
)
def test_every_loss_learns_with_a_reduced_vocabulary(loss: Any, own_head: bool) -> None:
    kept = most_frequent(torch.zeros(320), 40, [1, 2])
    drafter = make(steps=2, loss=loss, own_head=own_head, draft_ids=kept)
    assert drafter.needs.last_hidden == (loss != {"cross_entropy": 1.0})
    assert ("lm_head.weight" in drafter.state_dict()) == own_head
    batch = collate(rows_of(12, 7))
    found = drafter.loss(batch, features_of(drafter, batch))
    assert set(found.parts) == set(drafter.loss_parts) == {*loss, "accuracy", "accuracy_2"}
    found.total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())


@pytest.mark.field("F10", "F35")
def test_an_overfitted_sample_is_decoded_at_full_depth() -> None:
    """Deeper than it was trained for too."""
    target = load.tiny(seed=5, layers=7)
    prompt = [3, 4, 5, 6, 7, 8]
    outputs, _ = decode(target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=40, stop_ids=())
    batch = collate([(torch.tensor(prompt + outputs[0].ids), torch.arange(46) >= 6, 0)])
    torch.manual_seed(0)
    drafter = drafters.make(Eagle3, target, steps=3, fc_norm=True, norm_output=True)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    true = features_of(drafter, batch)
    for _ in range(80):
        loss = drafter.loss(batch, true)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    hits, count = loss.parts["accuracy_3"]
    assert float(hits / count) > 0.9
    plan = Plan(Tree.chain(5))
    _, tally = decode(target, drafter.eval(), [prompt], plan, max_new_tokens=40, stop_ids=())
    assert tally.tau > 4.3, tally


# Decoding -----------------------------------------------------------------------------------------
TARGETS: dict[str, dict[str, Any]] = {
    "llama, 3 taps": {},
    "mistral, 5 taps, 3.1": {**FLAGS["five taps"], "norm_output": True},
    "qwen3, q/k norms": {"qk_norm": True, "own_head": False},
    "qwen2, two layers": {"layers": 2},
    "gemma2, soft caps and norms that add 1": {
        "fc_norm": True,
        "draft_ids": list(range(0, 320, 2)),
    },
    "gpt_neox, no grouped heads": {"norm_before_fc": True, "norm_before_residual": True},
}


@pytest.mark.field("F39")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_is_the_targets_own(name: str, tied: bool) -> None:
    family = name.partition(",")[0]
    target = load.tiny(family=family, layers=8, tie_word_embeddings=tied)
    torch.manual_seed(0)
    drafter = drafters.make(Eagle3, target, **TARGETS[name]).eval()
    prompts = [[3, 5, 7, 3, 5], [11, 12], list(range(20, 60))]
    plain, _ = decode(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=12, stop_ids=())
    for tree in (Tree.chain(4), Tree.eagle1_static(), Dynamic(depth=3, top_k=3, total=8)):
        found, _ = decode(target, drafter, prompts, Plan(tree), max_new_tokens=12, stop_ids=())
        assert [one.ids for one in found] == [one.ids for one in plain]


@pytest.mark.parametrize("family", ["gpt2", "olmo2", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_a_plain_layer_serves_any_family(family: str) -> None:
    """Experts, norms after sub-layers, no rotary positions, two tables of them."""
    target = target_of(family)
    torch.manual_seed(0)
    drafter = drafters.make(Eagle3, target, steps=2).eval()
    prompts = [list(range(3, 32)), [5, 6, 7]]
    limits: dict[str, Any] = {"max_new_tokens": 6, "stop_ids": ()}
    plain, _ = decode(target, None, prompts, Plan(Tree.chain(0)), **limits)
    found, _ = decode(target, drafter, prompts, Plan(Tree.expansion([2, 2])), **limits)
    assert [one.ids for one in found] == [one.ids for one in plain]


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.expansion([3, 2, 1])], ids=["chain", "tree"])
def test_sampled_text_has_the_targets_distribution(tree: Tree) -> None:
    target = load.tiny(**{**SMALL, "layers": 7})
    torch.manual_seed(0)
    drafter = drafters.make(Eagle3, target, fc_norm=True, norm_output=True).eval()
    assert p_value(target, drafter, Plan(tree, Policy(1.0)), rows=3000) > 1e-3


# Its parts ----------------------------------------------------------------------------------------
def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("output", [False, True])
def test_a_step_is_the_published_formula(output: bool, residual: bool) -> None:
    """By hand, for one place: attention to itself only returns its value."""
    drafter = make(norm_output=output, norm_before_residual=residual, fc_norm=True).double()
    w = {name: value.double() for name, value in drafter.state_dict().items()}
    layers = {
        tap: torch.randn(
            1, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(tap)
        )
        for tap in drafter.taps
    }
    taps = [rms(layers[tap], w[f"fc_norm.{j}.weight"]) for j, tap in enumerate(drafter.taps)]
    g = torch.cat(taps, -1) @ w["fc.weight"].T
    token = torch.tensor([[7]])
    layer = {n.removeprefix("layers.0."): value for n, value in w.items() if "layers.0." in n}
    e = drafter.target.embedding.weight[token].double()
    normed = rms(g, layer["hidden_norm.weight"])
    u = torch.cat((rms(e, layer["input_layernorm.weight"]), normed), -1)
    v = (u @ layer["self_attn.v_proj.weight"].T).view(1, 1, 2, 16)
    read = v.repeat_interleave(2, 2).reshape(1, 1, 64)
    r = (normed if residual else g) + read @ layer["self_attn.o_proj.weight"].T
    x = rms(r, layer["post_attention_layernorm.weight"])
    gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    a = r + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    out, fed = drafter(drafter.fuse(layers), token, torch.zeros(1, 1, dtype=torch.int64))
    torch.testing.assert_close(drafter.fuse(layers), g)
    torch.testing.assert_close(out, rms(a, w["norm.weight"]))
    torch.testing.assert_close(fed, out if output else a)


def test_names_and_shapes_are_those_that_engines_load() -> None:
    drafter = make(fc_norm=True, qk_norm=True, draft_ids=list(range(100)))
    two = make(**FLAGS["two layers"], mlp=32, heads=2, own_head=False).state_dict()
    found = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    block = {
        "self_attn.q_proj": (64, 128),
        "self_attn.k_proj": (32, 128),
        "self_attn.v_proj": (32, 128),
        "self_attn.o_proj": (64, 64),
        "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
        "hidden_norm": (64,),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    assert found == {
        "draft_ids": (100,),
        **{f"fc_norm.{tap}.weight": (64,) for tap in range(3)},
        "fc.weight": (64, 192),
        **{f"layers.0.{name}.weight": shape for name, shape in block.items()},
        "norm.weight": (64,),
        "lm_head.weight": (100, 64),
    }
    assert two["layers.1.self_attn.q_proj.weight"].shape == (32, 64)
    assert two["layers.0.mlp.gate_proj.weight"].shape == (32, 64)
    assert not {"lm_head.weight", "layers.1.hidden_norm.weight"} & two.keys()
    assert "the outputs of layers 1, 3, 4 of 8" in drafter.describe()["reads"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_it_starts_with_the_targets_norm_and_head(family: str) -> None:
    """Also where a norm adds 1, logits are scaled (Granite), or the head has a bias (Phi), which
    an own head does not have."""
    if family in ("llama", "gemma2"):
        target = load.tiny(family=family)
    else:
        scaled = {"logits_scaling": 8.0} if family == "granite" else {}
        target = Target(model_of(family, "sdpa", **scaled), None, "tiny")
    if family != "phi":
        with torch.no_grad():
            getattr(target.base, target.norm_name).weight.add_(torch.linspace(0, 1, target.width))
    own, borrowed = (drafters.make(Eagle3, target, own_head=own) for own in (True, False))
    x = torch.randn(3, target.width, generator=torch.Generator().manual_seed(0))
    if family == "phi":
        assert bool((own.norm.weight == 1).all())  # LayerNorm is another norm
        torch.testing.assert_close(own.logits(x), x @ target.output.weight.T)
        return
    expected = getattr(target.base, target.norm_name)(x)
    torch.testing.assert_close(own.norm(x), expected, rtol=1e-4, atol=1e-4)
    small = 1e-3 * x  # where a soft cap does nothing
    torch.testing.assert_close(own.logits(small), borrowed.logits(small), rtol=1e-4, atol=1e-6)


def test_the_taps_of_targets_of_any_depth() -> None:
    assert default_taps(30) == (1, 14, 26) and default_taps(36) == (1, 17, 32)
    for layers in range(1, 40):
        taps = default_taps(layers)
        assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < layers
        assert len(taps) == (3 if layers > 3 else max(1, layers - 1))


def test_each_tap_is_read_and_kept_apart() -> None:
    drafter = make(taps=[0, 2, 5])
    batch = collate(rows_of(8))
    true = features_of(drafter, batch)
    assert list(true.layers) == [0, 2, 5]
    joined = torch.cat([true.layers[tap] for tap in (0, 2, 5)], -1)
    torch.testing.assert_close(drafter.fuse(true.layers), drafter.fc(joined))


# Bad input ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taps": [1, 3, 8]}, r"taps=\[1, 3, 8\].* from 0 to 7"),
        ({"taps": [1, 1, 3]}, r"every layer once"),
        ({"taps": [3, 1]}, "by rising number"),
        ({"taps": [-1, 3]}, "numbers of layers, from 0"),
        ({"taps": []}, "numbers of layers, from 0"),
        ({"taps": "1,3"}, "taps=1,3: needs numbers"),
        ({"taps": [True]}, "numbers of layers"),
        ({"layers": 0}, "layers=0"),
        ({"layers": 65}, "layers=65"),
        ({"mlp": -1}, "mlp=-1"),
        ({"heads": 3, "kv_heads": 2}, "heads=3, kv_heads=2"),
        ({"qk_norm": "no"}, "qk_norm=no"),
        ({"own_head": 1}, "own_head=1"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ({"norm_output": None}, "norm_output=None"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.0}, "steps=2.0"),
        ({"step_decay": 0}, "step_decay=0"),
        ({"step_decay": 1.5}, "step_decay=1.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"loss": {"nope": 1.0}}, "loss nope"),
        ({"loss": {"forward_kl": 0.0}}, "all weights of the loss are 0"),
        ({"beta": 1.0}, "beta=1.0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**settings)


def test_a_store_without_the_taps_is_refused(tmp_path: Path) -> None:
    target = load.tiny(layers=8)
    data = ConversationData(random_set(target, tmp_path / "set"))
    store = make_store(target, data, tmp_path / "store", layers=(1, 3))
    drafter = drafters.make(Eagle3, target)
    with pytest.raises(InputError, match=r"lacks layer 4, which .* the last .*, layer 1, layer 3"):
        StoredFeatures(target, drafter.needs, data=data, path=store)


def test_a_package_that_asks_for_far_more_than_it_holds() -> None:
    target = load.tiny(layers=8)
    settings = drafters.make(Eagle3, target).settings()
    Eagle3.check_held(target, settings, 20, 100_000)
    with pytest.raises(InputError, match=r"layers=64, mlp=1000000 need at least"):
        Eagle3.check_held(target, {**settings, "layers": 64, "mlp": 10**6}, 20, 100_000)
