"""EAGLE-1: alignment, the draft row that training and decoding share, vocabulary, and an overfitted
sample."""

from dataclasses import replace

import pytest
import torch

from drafttrain.data.datamodule import collate
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter import eagle1
from drafttrain.drafter.base import Committed
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.vocabulary import coverage, most_frequent
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.layers import new_layers
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.families import AFTER, EXPERTS, model_of, target_of

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox")
OTHERS = (*AFTER, *EXPERTS, "gpt2")


def make(family: str = "llama", **settings):
    target = load.tiny(family=family) if family in FAMILIES else target_of(family)
    torch.manual_seed(0)
    return target, drafters.make(Eagle1, target, **settings).eval()


def row(ids, mask) -> Batch:
    return collate([(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), 0)])


def features(target, batch: Batch) -> Features:
    return target.features(batch.input_ids, batch.lengths, Needs(last_hidden=True))


@pytest.mark.field("F09")
def test_alignment_of_five_prompt_and_four_answer_tokens(monkeypatch):
    """The dump (position, feature index, input token, label, weight): the first draft of the answer
    is supervised."""
    target, drafter = make(noise=0.0)
    ids = [10, 11, 12, 13, 14, 20, 21, 22, 23]
    batch = row(ids, [0] * 5 + [1] * 4)
    true = features(target, batch)
    seen = {}
    forward = Eagle1.forward

    def spy(self, hidden, tokens, positions, mask=None, cache=None):
        seen.update(hidden=hidden, tokens=tokens, positions=positions)
        return forward(self, hidden, tokens, positions, mask, cache)

    chosen = {}

    def over_vocabulary(out, teacher, head, divergence, *, chunk):
        chosen.update(out=out, teacher=teacher)
        return out.sum(), torch.zeros(len(out), dtype=torch.int64)

    monkeypatch.setattr(Eagle1, "forward", spy)
    monkeypatch.setattr("drafttrain.drafter.eagle1.losses.over_vocabulary", over_vocabulary)
    loss = drafter.loss(batch, true)
    assert seen["tokens"][0].tolist() == ids[1:-1]  # row i reads x_{i+1}
    assert seen["positions"][0].tolist() == list(range(7))  # at position i
    torch.testing.assert_close(seen["hidden"][0], true.last_hidden[0, :-2])  # with feature h_i
    # Rows 3..6 predict x_5..x_8; row 3 uses h_3, the last feature that the prompt gives before the
    # first draft x_5.
    assert int(loss.count) == 4
    torch.testing.assert_close(chosen["teacher"], true.last_hidden[0, 4:8])  # targets h_{i+1}


@pytest.mark.field("F09", "F33")
def test_no_label_from_padding_or_beyond_the_end():
    target, drafter = make(noise=0.0)
    short, long = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]
    rows = [
        (torch.tensor(x), torch.tensor([0, 0] + [1] * (len(x) - 2), dtype=torch.bool), i)
        for i, x in enumerate((short, long))
    ]
    both = collate(rows)
    together = drafter.loss(both, features(target, both))
    apart = [drafter.loss(b, features(target, b)) for b in (collate([r]) for r in rows)]
    assert int(together.count) == sum(int(a.count) for a in apart) == 7
    torch.testing.assert_close(together.total, sum(a.total for a in apart))
    wide = Batch(
        torch.nn.functional.pad(both.input_ids, (0, 9), value=3),
        torch.nn.functional.pad(both.loss_mask, (0, 9)),
        both.lengths,
        both.row_ids,
    )
    torch.testing.assert_close(drafter.loss(wide, features(target, wide)).total, together.total)


@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("ids", [[4, 5], [4, 5, 6], [4]])
def test_rows_too_short_to_teach_count_nothing_and_give_no_nan(ids):
    target, drafter = make()
    batch = row(ids, [0] * (len(ids) - 1) + [1])
    loss = drafter.loss(batch, features(target, batch))
    loss.total.backward()
    assert torch.isfinite(loss.total) and int(loss.count) == (1 if len(ids) > 2 else 0)
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in drafter.parameters())


@pytest.mark.field("F10", "F11")
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text", "qwen3_moe"])
def test_a_training_row_equals_the_drafting_step_of_its_prefix(family):
    target, drafter = make(family)
    x = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(3))
    hidden = target.features(x, torch.tensor([12]), Needs(last_hidden=True)).last_hidden
    with torch.inference_mode():
        trained = drafter(hidden[:, :-1], x[:, 1:], torch.arange(11)[None])
        for n in range(2, 12):
            state = drafter.open(1, 32)
            committed = Committed(Features(hidden[:, : n - 1]), x[:, 1:n], torch.tensor([n - 1]))
            out, _ = drafter.extend(state, committed, 1)
            torch.testing.assert_close(out[0, 0], trained[0, n - 2], rtol=1e-4, atol=1e-4)


@pytest.mark.field("F39")
@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.eagle1_static()], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_draft_logits_equal_a_recomputation_from_true_features(family, tree, monkeypatch):
    """After every round: nothing of a refused branch, and no feature of the drafter's own, may stay
    in its cache."""
    target, drafter = make(family)
    rounds = []
    extend = Eagle1.extend

    def spy(self, state, committed, depth):
        hidden, candidates = extend(self, state, committed, depth)
        rounds.append((committed, candidates.logits[:, 0].clone()))
        return hidden, candidates

    monkeypatch.setattr(Eagle1, "extend", spy)
    prompt = [7, 8, 9, 10]
    outputs, _ = decode(target, drafter, [prompt], Plan(tree), max_new_tokens=24, stop_ids=())
    text = torch.tensor([prompt + outputs[0].ids])
    monkeypatch.undo()
    known = 0
    with torch.inference_mode():
        for committed, logits in rounds:
            known += int(committed.counts[0])  # rows 0..known-1 are true by now
            hidden = target.features(
                text[:, :known], torch.tensor([known]), Needs(last_hidden=True)
            ).last_hidden
            out = drafter(hidden, text[:, 1 : known + 1], torch.arange(known)[None])
            torch.testing.assert_close(drafter.head(out[:, -1]), logits, rtol=1e-3, atol=1e-3)
    assert len(rounds) > 3


@pytest.mark.field("F11")
def test_a_deeper_draft_step_equals_the_naive_loop():
    """Position of step k is base + k, and a node sees the true rows and its own ancestors."""
    target, drafter = make()
    x = torch.tensor([[7, 8, 9, 10, 11]])
    hidden = target.features(x[:, :-1], torch.tensor([4]), Needs(last_hidden=True)).last_hidden
    tree = Tree.expansion([2, 2, 1])
    with torch.inference_mode():
        state = drafter.open(1, 32)
        committed = Committed(Features(hidden), x[:, 1:], torch.tensor([4]))
        proposal = drafter.propose(state, committed, tree, Policy(), None)
        for node in range(tree.size):
            if tree.depths[node] != 3:
                continue
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            inputs, tokens = hidden, x[:, 1:]
            for step in path:
                out = drafter(inputs, tokens, torch.arange(tokens.shape[1])[None])[:, -1:]
                choice = drafter.head(out[:, 0]).topk(2).indices[0]
                assert int(proposal.tokens[0, step]) == int(choice[tree.ranks[step]])
                inputs = torch.cat((inputs, out), 1)
                tokens = torch.cat((tokens, proposal.tokens[:, step : step + 1]), 1)


@pytest.mark.field("F10", "F35")
@pytest.mark.parametrize("draft_vocab", [0, 160])
def test_an_overfitted_sample_is_decoded_at_near_full_depth(draft_vocab):
    target = load.tiny(seed=5)
    prompt = [3, 4, 5, 6, 7, 8]
    outputs, _ = decode(target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=40, stop_ids=())
    ids = prompt + outputs[0].ids
    batch = row(ids, [0] * len(prompt) + [1] * 40)
    kept = None
    if draft_vocab:
        counts = torch.bincount(torch.tensor(outputs[0].ids), minlength=320)
        kept = most_frequent(counts, draft_vocab, target.stop_ids)
    torch.manual_seed(0)
    drafter = drafters.make(Eagle1, target, draft_ids=kept, noise=0.02, classification=1.0)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    noise = torch.Generator().manual_seed(0)
    true = features(target, batch)
    for _ in range(250):
        loss = drafter.loss(batch, true, generator=noise)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    hits, count = loss.parts["accuracy"]
    assert float(hits / count) > 0.97
    _, tally = decode(
        target, drafter.eval(), [prompt], Plan(Tree.chain(4)), max_new_tokens=40, stop_ids=()
    )
    assert tally.tau > 4.3, tally
    # Decoded acceptance of the first draft agrees with the teacher-forced accuracy on the same
    # text.
    assert abs(tally.accept_at[0] - float(hits / count)) < 0.1


@pytest.mark.field("F17")
def test_reduced_vocabulary_counts_outside_labels_as_misses():
    target = load.tiny()
    kept = most_frequent(torch.zeros(320), 8, [1, 2])
    _, drafter = make(draft_ids=kept)
    assert kept.tolist() == list(range(8))
    batch = row([50, 60, 70, 80, 90], [0, 0, 1, 1, 1])
    loss = drafter.loss(batch, features(target, batch))
    assert torch.isfinite(loss.total) and float(loss.parts["accuracy"][0]) == 0.0
    probs = torch.rand(2, 1, 8)
    wide = drafter.candidates(probs).spread(probs)
    assert wide.shape == (2, 1, 320) and torch.equal(wide[..., :8], probs)
    assert float(wide[..., 8:].sum()) == 0


@pytest.mark.field("F14")
def test_vocabulary_selection():
    counts = torch.tensor([0, 5, 0, 9, 1, 0])
    assert most_frequent(counts, 3, [0]).tolist() == [0, 1, 3]
    assert most_frequent(counts, 5, []).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]  # filled up with the lowest unused
    assert coverage(counts, torch.tensor([1, 3])) == pytest.approx(14 / 15)
    for size in (0, 1, 7):
        with pytest.raises(InputError, match="draft_vocab"):
            most_frequent(counts, size, [])
    with pytest.raises(InputError, match="draft_vocab is 2: give 3"):
        most_frequent(counts, 2, [0, 1, 2])


def test_noise_is_on_inputs_only_and_scaled_as_asked(monkeypatch):
    target, drafter = make(noise=0.1)
    batch = row(list(range(3, 35)), [0, 0] + [1] * 30)
    true = features(target, batch)
    seen = []
    forward = Eagle1.forward
    monkeypatch.setattr(
        Eagle1,
        "forward",
        lambda self, hidden, *rest: seen.append(hidden) or forward(self, hidden, *rest),
    )
    drafter.loss(batch, true, generator=torch.Generator().manual_seed(0))
    gap = (seen[-1] - true.last_hidden[:, :-2]).abs().max()
    assert 0.09 < float(gap) <= 0.1001
    drafter.config = replace(drafter.config, noise_scaled=True)
    drafter.loss(batch, true, generator=torch.Generator().manual_seed(0))
    scaled = (seen[-1] - true.last_hidden[:, :-2]).abs().max()
    torch.testing.assert_close(scaled, gap * 512 / 32, rtol=1e-3, atol=1e-3)
    drafter.loss(batch, true)
    torch.testing.assert_close(seen[-1], true.last_hidden[:, :-2])


def test_only_what_is_trained_is_owned():
    target, drafter = make(draft_ids=list(range(100)))
    drafter.head(torch.zeros(1, target.width))
    state = drafter.state_dict()
    assert {tuple(t.shape) for t in state.values()}.isdisjoint({(320, 64), (100, 64)})
    assert not any("input_layernorm" in name for name in state)
    d, ff = 64, 128
    expected = (
        2 * d * d + 2 * d * d + 2 * d * 32 + 3 * d * ff + d
    )  # fc, q and o, k and v, gated mlp, one norm
    assert sum(p.numel() for p in drafter.parameters()) == expected
    copy = drafter.at(torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(copy.state_dict().values(), state.values(), strict=True)
    )


# F98's kind: a family's own layer that cannot be driven without its first norm, or by one table of
# positions. Tried: norms after the sub-layers, biases, q/k norms, two rotary tables, partial rotary
# positions, none at all (GPT-2), dropout (Seed-OSS), experts of five families (F74), a layer that
# fails when driven.
@pytest.mark.field("F98", "F74")
@pytest.mark.parametrize("family", OTHERS)
def test_a_layer_for_any_decoder_only_family(family):
    """It drafts exact text, learns, and is made by the seed."""
    target, drafter = make(family)
    prompts = [list(range(3, 32)), [5, 6, 7]]
    limits = {"max_new_tokens": 6, "stop_ids": ()}
    plain, _ = decode(target, None, prompts, Plan(Tree.chain(0)), **limits)
    found, _ = decode(target, drafter, prompts, Plan(Tree.expansion([2, 2])), **limits)
    assert [one.ids for one in found] == [one.ids for one in plain]
    if family in EXPERTS:
        assert "experts" in drafter.plain
    else:
        assert bool(drafter.plain) == (family not in ("glm4", "seed_oss"))
    batch = row(list(range(3, 20)), [1] * 17)
    loss = drafter.requires_grad_(True).loss(batch, features(target, batch))
    loss.total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())
    state = drafter.state_dict()
    for other in (make(family)[1], drafter.at(torch.float32)):
        assert other.state_dict().keys() == state.keys()
        assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)


@pytest.mark.field("F98")
def test_a_plain_layer_has_the_targets_shape_and_turns():
    """Gemma-3 has a table for each kind of layer: attention is full, so it is that one's."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    target = Target(
        model_of("gemma3_text", "sdpa", rope_parameters=rope, **AFTER["gemma3_text"]), None, "tiny"
    )
    drafter = drafters.make(Eagle1, target)
    assert "differ in their rotary positions" in drafter.plain
    config = drafter.layer_config()
    assert config.rope_parameters == rope["full_attention"]
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 4, 16)
    x, places = torch.zeros(1, 4, 32), torch.arange(4)[None]
    own = target.base.rotary_emb(x, places, "full_attention")
    assert all(map(torch.equal, own, drafter._rotary(x, places)))
    assert not any("rotary" in name for name, _ in drafter.named_buffers())
    assert drafter.layer.self_attn.q_proj.weight.shape == (64, 32)
    assert "plain and dense" in drafter.describe()["layer"]
    assert "layer" not in make("llama")[1].describe()


@pytest.mark.field("F98")
def test_a_layer_that_fails_when_driven_is_replaced_and_the_cause_kept(monkeypatch):
    target = load.tiny()

    class Failing(torch.nn.Module):
        def forward(self, *_given, **_more):
            raise RuntimeError("needs its norm")

    def made(*given, plain=False, **more):
        return new_layers(*given, plain=plain, **more) if plain else [Failing()]

    monkeypatch.setattr(eagle1, "new_layers", made)
    drafter = drafters.make(Eagle1, target)
    assert "cannot be driven (needs its norm)" in drafter.plain
    assert drafter.describe()["layer"].startswith("plain and dense (the target's own layer")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"divergence": "nope"}, "loss nope"),
        ({"divergence": ["jsd"]}, "loss .'jsd'."),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": "much"}, "noise=much"),
        ({"regression": 0.0, "classification": 0.0}, "regression and classification"),
        ({"bias": "no"}, "bias=no"),
        ({"chunk": 1.5}, "chunk=1.5"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        make(**settings)


@pytest.mark.field("F12")
def test_rows_too_short_for_a_label_count_nothing():
    target, drafter = make()
    batch = row([3, 4], [0, 1])
    true = features(target, batch)
    loss = drafter.loss(batch, true)
    assert loss.parts.keys() == set(drafter.loss_parts) and all(
        float(value) == 0 for value, _ in loss.parts.values()
    )
    assert drafter.guesses(batch, true).tolist() == [[[-1], [-1]]]


@pytest.mark.field("F36")
def test_rotary_settings_of_the_target_are_carried_over():
    """With another rope the same weights give other outputs; the drafter uses the target's own
    rotary module."""
    scaled = load.tiny(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    plain = load.tiny()
    torch.manual_seed(0)
    one = drafters.make(Eagle1, scaled)
    torch.manual_seed(0)
    other = drafters.make(Eagle1, plain)
    hidden, tokens = torch.randn(1, 9, 64), torch.arange(9)[None]
    far = torch.arange(40, 49)[None]
    with torch.no_grad():
        near = torch.arange(9)[None]
        assert float((one(hidden, tokens, near) - other(hidden, tokens, near)).abs().max()) > 1e-4
        # Rotary attention sees differences of positions only: a common offset changes nothing.
        torch.testing.assert_close(
            one(hidden, tokens, far), one(hidden, tokens, near), rtol=1e-4, atol=1e-4
        )
