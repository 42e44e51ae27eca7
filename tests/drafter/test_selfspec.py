"""The target drafting for itself without some of its sub-layers: exact text, true keys and values,
no vain reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.data.datamodule import collate
from drafttrain.decoding.costs import measure_costs
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.errors import InputError
from drafttrain.flow import Features, Needs
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.inside import PLAIN, PROMPTS, TREES, check_entries, counted, texts, watched
from tests.drafter.make import make
from tests.messages import said

SKIPS: dict[str, dict[str, Any]] = {
    "a layer": {"skip_attention": [1], "skip_mlp": [1]},
    "the first attention": {"skip_attention": [0]},
    "parts of two": {"skip_attention": [2], "skip_mlp": [1]},
    "the last, few tokens": {
        "skip_attention": [2],
        "skip_mlp": [2],
        "draft_ids": list(range(0, 320, 2)),
    },
}


def made(family: str = "llama", **settings: Any) -> tuple[Target, SelfSpec]:
    target = load.tiny(family=family)
    return target, make(SelfSpec, target, **(settings or SKIPS["parts of two"]))


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.expansion([2, 2, 1])], ids=["chain", "tree"])
@pytest.mark.parametrize("family", load.TINY)
def test_with_nothing_left_out_everything_is_accepted(family: str, tree: Tree) -> None:
    target = load.tiny(family=family)
    limit = 1 + 3 * (tree.max_depth + 1)
    outputs, tally = decode(
        target, make(SelfSpec, target), PROMPTS, Plan(tree), max_new_tokens=limit, stop_ids=()
    )
    assert tally.tau == tree.max_depth + 1 and tally.rounds == 3 * len(PROMPTS)
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=limit, stop_ids=())[0]
    )


def test_drawn_drafts_of_the_full_target_are_accepted_too() -> None:
    target = load.tiny()
    plan = Plan(Tree.chain(3), Policy(1.0))
    assert (
        decode(
            target, make(SelfSpec, target), PROMPTS, plan, max_new_tokens=1 + 3 * 4, stop_ids=()
        )[1].tau
        == 4
    )


@pytest.mark.field("F52")
@pytest.mark.parametrize(
    ("family", "skips", "tree"),
    [
        *((family, "parts of two", tree) for family in load.TINY for tree in ("chain", "tree")),
        *(("llama", "parts of two", tree) for tree in ("dynamic", "confident")),
        *(("llama", name, "tree") for name in SKIPS if name != "parts of two"),
    ],
)
def test_greedy_output_is_the_targets_own(family: str, skips: str, tree: str) -> None:
    target, drafter = made(family, **SKIPS[skips])
    plain = texts(decode(target, None, PROMPTS, PLAIN, max_new_tokens=20, stop_ids=())[0])
    stop = (plain[0][7], plain[1][13])
    outputs, tally = decode(
        target, drafter, PROMPTS, Plan(TREES[tree]), max_new_tokens=20, stop_ids=stop
    )
    for ids, output in zip(plain, outputs, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in stop), len(ids))
        assert output.ids == ids[:end]
    assert tally.drafted


@pytest.mark.field("F53")
@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (Plan(Tree.chain(3), Policy(1.0)), {"skip_attention": [1], "skip_mlp": [1, 2]}),
        (Plan(Tree.expansion([3, 2]), Policy(0.7)), {"skip_attention": [0], "skip_mlp": [1]}),
        (Plan(Tree.chain(2), Policy(1.0)), {"skip_mlp": [2], "draft_ids": [0, 1, 3, 4, 6]}),
    ],
    ids=["chain", "tree", "reduced vocabulary"],
)
def test_sampled_text_follows_the_targets_distribution(
    plan: Plan, settings: dict[str, Any]
) -> None:
    target = load.tiny(**{**SMALL, "layers": 3})  # type: ignore[arg-type]
    assert p_value(target, make(SelfSpec, target, **settings), plan, rows=2000) > 1e-3


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_a_sampled_row_does_not_depend_on_its_neighbours(tree: str) -> None:
    target, drafter = made()
    plan = Plan(TREES[tree], Policy(1.0))
    together, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=16, stop_ids=(), seed=4)
    for number, prompt in enumerate(PROMPTS):
        single, _ = decode(
            target,
            drafter,
            [prompt],
            plan,
            max_new_tokens=16,
            stop_ids=(),
            seed=4,
            row_numbers=[number],
        )
        assert single[0].ids == together[number].ids


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.field("F39")
@pytest.mark.parametrize("tree", ["chain", "tree", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_the_targets_cache_keeps_its_own_keys_and_values(
    family: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that a draft makes after what it leaves out, and in the order of the text."""
    target, drafter = made(family)
    with watched(monkeypatch) as seen:
        outputs, tally = decode(
            target, drafter, PROMPTS, Plan(TREES[tree]), max_new_tokens=12, stop_ids=()
        )
    assert check_entries(target, outputs, seen) >= 6
    assert tally.accepted, "a path that was accepted is moved together"


@pytest.mark.parametrize("tree", TREES)
def test_a_layer_reads_a_token_twice_only_where_the_draft_differs(tree: str) -> None:
    """A draft reads the anchor and what has children. Layers before the first that lacks something
    need not read these again."""
    growth: Growth = TREES[tree]
    target = load.tiny(layers=4)
    drafter = make(SelfSpec, target, skip_attention=[1, 2], skip_mlp=[1])
    prompt = PROMPTS[0]
    with counted(target) as counts:
        (output,), tally = decode(
            target, drafter, [prompt], Plan(growth, Policy(1.0)), max_new_tokens=9, stop_ids=()
        )
    rounds = tally.rounds
    drafted = growth.size if tree != "dynamic" else None
    verified = len(prompt) + rounds * (growth.size + 1)
    drafts = counts[3] - verified
    if drafted is not None:
        inner = growth.size - (1 if tree != "tree" else 4)
        assert drafts == rounds * (inner + 1)
    # Layer 1 is left out, layer 2 lacks its attention and is another module then.
    assert counts[1] == counts[2] == verified and drafts > 0
    read_first = {"dynamic": len(prompt) + rounds * (1 + growth.reads)}.get(tree, verified)
    assert counts[0] >= read_first and counts[0] < verified + drafts
    if drafted is not None:
        assert counts[0] == verified, "every token once"
    assert len(output.ids) == 9


@pytest.mark.parametrize("tree", TREES)
def test_what_a_growth_says_was_read_was_read(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds the entries of drafted tokens by these numbers."""
    target, drafter = made()
    rounds: list[list[torch.Tensor]] = []
    expand, propose = SelfSpec.expand, SelfSpec.propose
    compared = 0

    def read(self: SelfSpec, state: Any, tokens: torch.Tensor, *more: Any) -> Any:
        rounds[-1].append(tokens)
        return expand(self, state, tokens, *more)

    def spy(self: SelfSpec, *given: Any) -> Any:
        nonlocal compared
        rounds.append([])
        out = propose(self, *given)
        tokens = torch.cat((out.tokens.new_empty(len(out.tokens), 0), *rounds[-1]), 1)
        there = out.read >= 0
        assert int(out.read.max()) < tokens.shape[1] and bool(there.any())
        assert torch.equal(tokens.gather(1, out.read.clamp_min(0))[there], out.tokens[there])
        for row in range(len(out.read)):
            kept = out.read[row][there[row]].tolist()
            assert len(set(kept)) == len(kept), "each its own"
        compared += int(there.sum())
        return out

    monkeypatch.setattr(SelfSpec, "expand", read)
    monkeypatch.setattr(SelfSpec, "propose", spy)
    decode(target, drafter, PROMPTS, Plan(TREES[tree], Policy(1.0)), max_new_tokens=6, stop_ids=())
    assert compared > 10


def test_only_a_reduced_vocabulary_is_proposed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = made(**SKIPS["the last, few tokens"])
    seen: list[int] = []
    propose = SelfSpec.propose

    def spy(self: SelfSpec, *given: Any) -> Any:
        out = propose(self, *given)
        seen.extend(out.tokens.flatten().tolist())
        return out

    monkeypatch.setattr(SelfSpec, "propose", spy)
    decode(target, drafter, PROMPTS, Plan(TREES["tree"]), max_new_tokens=8, stop_ids=())
    assert seen and all(token % 2 == 0 for token in seen)
    assert drafter.choices == 160 and "draft_ids" in drafter.state_dict()


def test_its_drafts_are_those_of_the_silenced_target_over_true_entries() -> None:
    """The first draft of a round: what the target without these parts says of the anchor, over keys
    and values of the full one."""
    target, drafter = made(skip_attention=[2], skip_mlp=[1])
    text = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        cache = target.new_cache(1, 64)
        target.step(text[:, :-1], cache)
        cache.commit(torch.tensor([text.shape[1] - 1]))
        state = drafter.open(1, 64)
        drafter.attach(state, cache)
        committed = Committed(
            Features(), text[:, 1:], torch.tensor([text.shape[1] - 1]), first=text[:, 0]
        )
        proposal = drafter.propose(state, committed, Tree.chain(1), Policy(), None)
        before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        layers = target.decoder_layers
        layers[2].self_attn.o_proj.weight.zero_()
        layers[1].mlp.down_proj.weight.zero_()
        expected = target.head(target.step(text[:, -1:], cache).hidden)[0, 0]
    assert int(proposal.tokens) == int(expected.argmax())
    assert all(
        torch.equal(a[:, :, :29], b[:, :, :29])
        for a, b in zip(before, (*cache.keys, *cache.values), strict=True)
    )


def test_costs_can_be_measured() -> None:
    target, drafter = made(skip_attention=[1], skip_mlp=[1])
    trees = [Tree.chain(2), Tree.expansion([2, 1])]
    found = measure_costs(target, drafter, Policy(), trees, context=8, repeats=1)
    assert (
        set(found.drafted) == set(trees)
        and set(found.verified) == {0, 2, 4}
        and all(v > 0 for v in found.drafted.values())
    )


# --- what it is -----------------------------------------------------------------------------------


def test_it_has_nothing_of_its_own() -> None:
    target, drafter = made()
    assert (
        not drafter.state_dict()
        and not list(drafter.parameters())
        and not drafter.learns
        and drafter.can_draw
    )
    assert (drafter.dtype, drafter.device, drafter.needs) == (target.dtype, target.device, Needs())
    assert drafter.at(torch.bfloat16) is drafter
    other = load.tiny(seed=1)
    moved = drafter.at(torch.float32, other)
    assert moved.target is other and moved.settings() == drafter.settings()
    assert (
        drafter.shared_layer == 0
        and make(SelfSpec, target, skip_mlp=[0]).shared_layer is None
        and make(SelfSpec, target).shared_layer == 2
    )
    batch = collate([(torch.tensor([3, 4, 5]), torch.tensor([False, True, True]), 0)])
    with pytest.raises(InputError, match=said("drafter.nothing_to_train")):
        drafter.loss(batch, Features())


def test_the_share_of_weights_that_a_draft_reads() -> None:
    target = load.tiny()
    attention, mlp = target.stack.sizes()
    head = target.output.weight.numel()
    every = sum(attention) + sum(mlp) + head
    assert make(SelfSpec, target).share == 1
    assert make(SelfSpec, target, skip_attention=[0], skip_mlp=[2]).share == pytest.approx(
        (every - attention[0] - mlp[2]) / every
    )
    few = make(SelfSpec, target, draft_ids=list(range(80)))
    assert few.share == pytest.approx((every - head * 3 / 4) / every)
    assert "skip_mlp" in few.describe()


def test_without_the_targets_cache_it_says_what_it_needs() -> None:
    _, drafter = made()
    committed = Committed(Features(), torch.tensor([[4]]), torch.tensor([1]))
    with pytest.raises(ValueError, match=said("drafter.not_attached")):
        drafter.propose(drafter.open(1, 8), committed, Tree.chain(1), Policy(), None)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"skip_attention": [3]}, r"skip_attention=\[3\]: .* from 0 to 2"),
        ({"skip_mlp": [-1]}, r"skip_mlp=\[-1\]"),
        ({"skip_mlp": [0, 0]}, r"skip_mlp=\[0, 0\]"),
        ({"skip_mlp": [True]}, r"skip_mlp=\[True\]"),
        ({"skip_mlp": [1.0]}, r"skip_mlp=\[1.0\]"),
        ({"skip_attention": "1"}, "skip_attention=1"),
        ({"skip_attention": 1}, "skip_attention=1"),
        ({"skip_attention": [0, 1, 2], "skip_mlp": [2, 1, 0]}, "skip_attention and skip_mlp"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make(SelfSpec, load.tiny(), **settings)
