"""Drafts that leave the target early, through an adapter: exact text, rows shared by training and
decoding, nothing read twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.data.joining import join, taken_apart
from drafttrain.decoding.costs import measure_costs
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.early_exit import EarlyExit, EarlyExitState
from drafttrain.drafter.inside import InsideState
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.block import Block
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.topology import Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.inside import PLAIN, PROMPTS, TREES, check_entries, counted, texts, watched
from tests.drafter.make import make
from tests.messages import said


def made(
    family: str = "llama", *, stirred: bool = True, **settings: Any
) -> tuple[Target, EarlyExit]:
    """A drafter after the middle layer, its adapter no longer what it starts as."""
    target = load.tiny(family=family)
    torch.manual_seed(0)
    drafter = make(EarlyExit, target, **{"exit_layer": 1, **settings}).eval()
    if stirred:
        with torch.no_grad():
            drafter.block.o.weight.normal_(0, 0.05)
    return target, drafter


def row(ids: list[int], mask: list[int], number: int = 0) -> tuple[Tensor, Tensor, int]:
    return torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), number


def features(target: Target, batch: Batch, drafter: EarlyExit) -> Features:
    """Copied, so that gradients can flow through what is made of them."""
    found = target.features(batch.input_ids, batch.lengths, drafter.needs)
    hidden = found.last_hidden
    return Features(
        None if hidden is None else hidden.clone(),
        {layer: value.clone() for layer, value in found.layers.items()},
    )


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tree"),
    [*((family, Tree.chain(4)) for family in load.TINY), ("mistral", Tree.expansion([2, 2, 1]))],
    ids=[*load.TINY, "mistral, tree"],
)
def test_a_new_adapter_after_the_last_layer_is_the_target(family: str, tree: Tree) -> None:
    target, drafter = made(family, stirred=False, exit_layer=2, mlp=32)
    limit = 1 + 3 * (tree.max_depth + 1)
    outputs, tally = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=limit, stop_ids=())
    assert tally.tau == tree.max_depth + 1 and tally.rounds == 3 * len(PROMPTS)
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=limit, stop_ids=())[0]
    )


@pytest.mark.field("F52")
@pytest.mark.parametrize(
    ("family", "settings", "tree"),
    [
        *((family, {}, tree) for family in load.TINY for tree in ("chain", "tree")),
        *(("llama", {}, tree) for tree in ("dynamic", "confident")),
        ("llama", {"exit_layer": 0, "heads": 2, "mlp": 48}, "tree"),
        ("llama", {"exit_layer": 2, "draft_ids": list(range(0, 320, 2))}, "tree"),
    ],
)
def test_greedy_output_is_the_targets_own(family: str, settings: dict[str, Any], tree: str) -> None:
    target, drafter = made(family, **settings)
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
        (Plan(Tree.chain(3), Policy(1.0)), {}),
        (Plan(TREES["dynamic"], Policy(1.0)), {}),
        (Plan(Tree.chain(2), Policy(1.0)), {"draft_ids": [0, 1, 3, 4, 6]}),
    ],
    ids=["chain", "dynamic", "reduced vocabulary"],
)
def test_sampled_text_follows_the_targets_distribution(
    plan: Plan, settings: dict[str, Any]
) -> None:
    target = load.tiny(**{**SMALL, "layers": 3})  # type: ignore[arg-type]
    torch.manual_seed(0)
    drafter = make(EarlyExit, target, **{"exit_layer": 1, **settings}).eval()
    assert p_value(target, drafter, plan, rows=2000) > 1e-3


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


def test_an_adapter_in_low_precision_leaves_the_text_alone() -> None:
    target, drafter = made()
    half = drafter.at(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half.shared_layer == 1
    outputs, _ = decode(target, half, PROMPTS, Plan(TREES["tree"]), max_new_tokens=12, stop_ids=())
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=12, stop_ids=())[0]
    )
    same = drafter.at(torch.float32)
    assert same.settings() == drafter.settings()
    assert all(
        torch.equal(a, b) for a, b in zip(same.parameters(), drafter.parameters(), strict=True)
    )


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["chain", "tree", "confident"])
@pytest.mark.parametrize("exit_layer", [0, 1, 2])
def test_no_layer_reads_a_token_twice(exit_layer: int, tree: str) -> None:
    target, drafter = made(exit_layer=exit_layer)
    growth = TREES[tree]
    with counted(target) as counts:
        _, tally = decode(
            target, drafter, PROMPTS[:1], Plan(growth, Policy(1.0)), max_new_tokens=9, stop_ids=()
        )
    assert counts == [len(PROMPTS[0]) + tally.rounds * (growth.size + 1)] * 3


@pytest.mark.field("F39")
@pytest.mark.parametrize("tree", ["chain", "tree", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_the_targets_cache_keeps_the_text_alone(
    family: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, whatever the order in which drafts were read."""
    target, drafter = made(family)
    with watched(monkeypatch) as seen:
        outputs, tally = decode(
            target, drafter, PROMPTS, Plan(TREES[tree]), max_new_tokens=12, stop_ids=()
        )
    assert check_entries(target, outputs, seen) >= 6 and tally.accepted


@pytest.mark.field("F10")
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_a_round_drafts_what_training_would_guess(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution after the anchor, from its own cache, is that of one pass over the text."""
    target, drafter = made("mistral")
    rounds: list[tuple[list[int], Tensor]] = []
    extend = EarlyExit.extend

    def spy(
        self: EarlyExit, state: InsideState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        hidden, candidates = extend(self, state, committed, depth)
        assert isinstance(state, EarlyExitState)
        rounds.append((state.rows.lengths.tolist(), candidates.logits[:, 0].clone()))
        return hidden, candidates

    monkeypatch.setattr(EarlyExit, "extend", spy)
    outputs, _ = decode(target, drafter, PROMPTS, Plan(TREES[tree]), max_new_tokens=12, stop_ids=())
    assert rounds[0][0] == [len(prompt) + 1 for prompt in PROMPTS]
    compared = 0
    with torch.inference_mode():
        for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            text = torch.tensor([prompt + output.ids])
            stream = target.features(text, torch.tensor([text.shape[1]]), drafter.needs).layers[1]
            logits = drafter.head(drafter(stream, torch.arange(text.shape[1])[None]))[0]
            for lengths, found in rounds:
                if len(lengths) == len(PROMPTS):
                    torch.testing.assert_close(
                        found[number], logits[lengths[number] - 1], rtol=1e-3, atol=1e-3
                    )
                    compared += 1
    assert compared >= 6


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_every_drafted_node_equals_one_pass_over_its_path(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = made(family)
    tree, read = Tree.expansion([2, 2, 1]), list[Tensor]()
    expand = EarlyExit.expand

    def spy(self: EarlyExit, *arguments: Any) -> tuple[Tensor, Candidates]:
        hidden, candidates = expand(self, *arguments)
        read.append(candidates.logits)
        return hidden, candidates

    monkeypatch.setattr(EarlyExit, "expand", spy)
    prompts, lengths = (
        torch.randint(3, 320, (2, 31), generator=torch.Generator().manual_seed(1)),
        torch.tensor([31, 17]),
    )
    with torch.inference_mode():
        cache, state = target.new_cache(2, 64), drafter.open(2, 64)
        drafter.attach(state, cache)
        stream = target.step(prompts, cache, layers=(1,)).layers[1]
        cache.commit(lengths - 1)
        committed = Committed(
            Features(layers={1: stream[:, :-1]}), prompts[:, 1:], lengths - 1, first=prompts[:, 0]
        )
        proposal = drafter.propose(state, committed, tree, Policy(), None)
        assert state.rows.lengths.tolist() == [31, 17] and cache.lengths.tolist() == [30, 16]
        compared = 0
        for logits, nodes in zip(read, tree.levels(), strict=False):
            for place, node in enumerate(nodes):
                path, at = list[int](), node
                while at >= 0:
                    path.insert(0, at)
                    at = tree.parents[at]
                for b, length in enumerate(lengths.tolist()):
                    text = torch.cat((prompts[b, :length], proposal.tokens[b, path]))[None]
                    found = target.features(
                        text, torch.tensor([text.shape[1]]), drafter.needs
                    ).layers[1]
                    plain = drafter.head(drafter(found, torch.arange(text.shape[1])[None])[:, -1])[
                        0
                    ]
                    torch.testing.assert_close(logits[b, place], plain, rtol=1e-3, atol=1e-3)
                    compared += 1
    assert compared == 2 * (2 + 4)


def test_guesses_are_what_is_drafted_after_the_text() -> None:
    target, drafter = made()
    outputs, tally = decode(
        target, drafter, PROMPTS[:1], Plan(Tree.chain(1)), max_new_tokens=24, stop_ids=()
    )
    ids = PROMPTS[0] + outputs[0].ids
    batch = collate([row(ids, [0] * len(PROMPTS[0]) + [1] * len(outputs[0].ids))])
    guesses = drafter.guesses(batch, features(target, batch, drafter))[0, :, 0]
    assert guesses[: len(PROMPTS[0])].tolist() == [-1] * len(PROMPTS[0])
    place = len(PROMPTS[0]) + 1
    for _, kept in outputs[0].runs[1:-1]:
        assert (int(guesses[place]) == ids[place]) == (kept == 1)
        place += kept + 1
    assert tally.rounds > 8


def test_costs_can_be_measured() -> None:
    target, drafter = made()
    trees = [Tree.chain(2), Tree.expansion([2, 1])]
    found = measure_costs(target, drafter, Policy(), trees, context=8, repeats=1)
    assert (
        set(found.drafted) == set(trees)
        and set(found.verified) == {0, 2, 4}
        and all(v > 0 for v in found.drafted.values())
    )


# --- training -------------------------------------------------------------------------------------


@pytest.mark.field("F09")
@pytest.mark.parametrize(
    "settings",
    [{}, {"draft_ids": list(range(0, 320, 2))}, {"mlp": 32}],
    ids=["plain", "few tokens", "mlp"],
)
def test_the_loss_of_every_label_by_hand(settings: dict[str, Any]) -> None:
    """Row i, of the stream after the exit, predicts x_{i+1} against the target's distribution;
    the weight is the label's mask."""
    weights = {"forward_kl": 0.5, "total_variation": 2.0, "cross_entropy": 1.0}
    target, drafter = made(**settings, loss=weights, chunk=3)
    ids, mask = [10, 11, 12, 13, 14, 20, 22, 24, 27], [0, 1, 0, 0, 0, 1, 1, 1, 1]
    short = row([5, 6, 7, 8], [0, 0, 1, 1], 1)
    batch = collate([row(ids, mask), short])
    loss = drafter.loss(batch, features(target, batch, drafter))
    kept = slice(None) if drafter.draft_ids is None else drafter.draft_ids
    sums, right = dict.fromkeys(weights, 0.0), 0
    for text, labels, _ in (row(ids, mask), short):
        with torch.no_grad():
            p = target.model(input_ids=text[None]).logits[0].float()[:, kept].softmax(-1)
            stream = target.model(input_ids=text[None], output_hidden_states=True).hidden_states[2]
            out = drafter.norm(drafter.block(stream, torch.arange(len(text))[None]))
            q = target.model.lm_head(out)[0][:, kept].softmax(-1)
        for i in range(len(text) - 1):
            if not labels[i + 1]:
                continue
            place = int(drafter.to_draft_ids(text[i + 1]))
            sums["forward_kl"] += float((p[i] * (p[i] / q[i]).log()).sum())
            sums["total_variation"] += float((p[i] - q[i]).abs().sum() / 2)
            sums["cross_entropy"] -= float(q[i, place].log()) if place >= 0 else 0.0
            right += int(q[i].argmax()) == place
    assert int(loss.count) == 7 and set(loss.parts) == set(drafter.loss_parts)
    for name, value in sums.items():
        assert float(loss.parts[name][0]) == pytest.approx(value, rel=1e-3, abs=1e-3)
    total = sum(weights[name] * value for name, value in sums.items())
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-3)
    assert int(loss.parts["accuracy"][0]) == right


@pytest.mark.field("F33")
def test_guesses_of_joined_rows_are_those_of_the_rows_by_themselves() -> None:
    """A row's first token follows nothing of its own: none is guessed for it, marked or not."""
    target, drafter = made(draft_ids=list(range(0, 320, 2)))
    rows = [
        row(list(range(9, 25)), [0, 0] + [1] * 14),
        row([5, 6, 7, 8], [1, 0, 1, 1], 1),
        row([30], [1], 2),
        row(list(range(60, 70)), [0] * 5 + [1] * 5, 3),
    ]
    batch, layer = join(rows, 24), drafter.config.exit_layer
    stream = torch.zeros(*batch.input_ids.shape, target.width)
    expected = []
    for number, one in enumerate(rows):
        single = collate([one])
        true = features(target, single, drafter)
        assert batch.packing is not None
        stream[batch.packing.document_ids == number] = true.layers[layer][0]
        expected.append(drafter.guesses(single, true)[0])
    joined = drafter.guesses(batch, Features(layers={layer: stream}))
    for one, found, same in zip(rows, taken_apart(joined, batch), expected, strict=True):
        assert torch.equal(found, same)
        assert torch.equal(found[1:, 0] >= 0, one[1][1:]) and int(found[0]) == -1


def test_only_the_adapter_gets_a_gradient() -> None:
    target, drafter = made(mlp=32)
    batch = collate([row([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1])])
    drafter.loss(batch, features(target, batch, drafter)).total.backward()
    assert {name.partition(".")[0] for name, _ in drafter.named_parameters()} == {"block", "norm"}
    # Before a projection that starts as zero.
    zero = ("block.mlp.gate", "block.mlp.up", "block.mlp.norm")
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) != name.startswith(zero), name
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("ids", [[4], [4, 5], [4, 5, 6]])
def test_short_rows_and_rows_without_labels_give_no_nan(ids: list[int]) -> None:
    target, drafter = made()
    for mask in ([0] * len(ids), [0] * (len(ids) - 1) + [int(len(ids) > 1)]):
        batch = collate([row(ids, mask)])
        loss = drafter.loss(batch, features(target, batch, drafter))
        # Of a single token nothing is read: the training module adds what has no gradient.
        assert loss.total.requires_grad == (len(ids) > 1)
        if len(ids) > 1:
            loss.total.backward()
            assert all(p.grad is not None for p in drafter.parameters())
        assert torch.isfinite(loss.total) and int(loss.count) == sum(mask)
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in drafter.parameters())
        guesses = drafter.guesses(batch, features(target, batch, drafter))
        assert (guesses >= 0).sum() == sum(mask)


def test_a_loss_on_the_text_needs_no_distribution() -> None:
    _, drafter = made(loss={"cross_entropy": 1.0, "forward_kl": 0.0})
    assert drafter.needs == Needs(layers=(1,)) and made()[1].needs == Needs(
        last_hidden=True, layers=(1,)
    )


def test_it_starts_as_the_targets_head_on_the_exit_layer_and_learns() -> None:
    target, drafter = made(stirred=False, exit_layer=0, mlp=64)
    (output,), _ = decode(target, None, PROMPTS[:1], PLAIN, max_new_tokens=40, stop_ids=())
    batch = collate([row(PROMPTS[0] + output.ids, [0] * 4 + [1] * 40)])
    true, frozen = (
        features(target, batch, drafter),
        {name: p.clone() for name, p in target.model.named_parameters()},
    )
    with torch.no_grad():
        stream = true.layers[0]
        torch.testing.assert_close(
            drafter(stream, torch.arange(44)[None]), target.base.norm(stream)
        )
    plan = Plan(Tree.chain(4))
    before = decode(target, drafter, PROMPTS[:1], plan, max_new_tokens=40, stop_ids=())[1].tau
    adam = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        adam.zero_grad()
        loss = drafter.loss(batch, true)
        losses.append(float(loss.total.detach()))
        (loss.total / loss.count).backward()
        adam.step()
    after = decode(target, drafter, PROMPTS[:1], plan, max_new_tokens=40, stop_ids=())[1].tau
    assert losses[-1] < losses[0] / 20
    assert before is not None and after is not None and after > before + 0.5
    assert all(torch.equal(p, frozen[name]) for name, p in target.model.named_parameters())


# --- the block ------------------------------------------------------------------------------------


@pytest.mark.field("F36")
def test_rotary_positions_are_those_of_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from drafttrain.nn.block import rotated

    target = load.tiny()
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 30, 31]])
    cos, sin = target.base.rotary_emb(x, position_ids=positions)
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rotated(x, positions, 10000.0), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mlp", [0, 24])
def test_a_block_through_a_cache_is_the_block(mlp: int) -> None:
    torch.manual_seed(0)
    block = Block(32, 4, 2, 8, mlp=mlp)
    x = torch.randn(2, 6, 32)
    assert torch.equal(block(x, torch.arange(6)[None]), x), "it starts as its input"
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        full = block(x, torch.arange(6)[None])
        cache, parts = KVCache(2, 6), []
        for start in (0, 2, 5):
            part = x[:, start : {0: 2, 2: 5, 5: 6}[start]]
            s = part.shape[1]
            mask = cache.mask(torch.ones(1, s, s, dtype=torch.bool).tril())
            parts.append(block(part, torch.arange(start, start + s)[None], mask, cache))
            cache.advance(s)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(full, x)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"exit_layer": 3}, "exit_layer=3: .* from 0 to 2"),
        ({"exit_layer": -1}, "exit_layer=-1"),
        ({"exit_layer": 1.0}, "exit_layer=1.0"),
        ({"exit_layer": True}, "exit_layer=True"),
        ({"heads": 3}, "heads=3"),
        ({"heads": 64}, "heads=64"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"heads": -1}, "heads=-1"),
        ({"mlp": 1.5}, "mlp=1.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"loss": {"l2": 1.0}}, "loss l2"),
        ({"loss": {"forward_kl": 0.0}}, said("drafter.no_loss")),
        ({"beta": 0.0}, "beta=0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make(EarlyExit, load.tiny(), **settings)
