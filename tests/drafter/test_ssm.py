"""A small causal LM as drafter: its origins, what it borrows, the rows that training and decoding
share, and exact text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.data.joining import join, taken_apart
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.lending import Lent
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.standalone import owns_all
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.make import make
from tests.helpers import tiny_chat_target, tiny_tokenizer
from tests.messages import said

PLAIN = Plan(Tree.chain(0))
ALL = ["embedding", "norm", "head"]
PROMPTS = [[3, 5, 7, 9], [11], list(range(20, 50))]
"""Of ragged lengths, one beyond the window of the sliding families."""
TREES: dict[str, Growth] = {
    "chain": Tree.chain(4),
    "tree": Tree.expansion([2, 2, 1]),
    "dynamic": Dynamic(depth=4, top_k=3, total=9),
    "confident": Confident(k=4, stop_below=0.001),
}
ORIGINS: dict[str, dict[str, Any]] = {
    "cut": {"layers": [0, 2]},
    "cut, all its own": {"layers": [0, 2], "own": ALL},
    "cut, its own head": {"layers": [1], "own": ["head"]},
    "cut, reduced vocabulary": {"layers": [0, 2], "draft_ids": list(range(0, 320, 2))},
    "new": {"layers": 2},
    "new and narrow": {"layers": 2, "width": 32, "heads": 2, "mlp": 48},
}


def made(family: str = "llama", **settings: Any) -> tuple[Target, Ssm]:
    target = load.tiny(family=family)
    torch.manual_seed(0)
    return target, make(Ssm, target, **(settings or ORIGINS["cut"])).eval()


def row(ids: list[int], mask: list[int], number: int = 0) -> tuple[Tensor, Tensor, int]:
    return torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), number


def features(target: Target, batch: Batch) -> Features:
    return target.features(batch.input_ids, batch.lengths, Needs(last_hidden=True))


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.ids for output in outputs]


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.field("F10", "F35")
@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.expansion([2, 2, 1])], ids=["chain", "tree"])
@pytest.mark.parametrize("family", load.TINY)
def test_a_cut_of_all_layers_accepts_everything(family: str, tree: Tree) -> None:
    target, drafter = made(family, layers=[0, 1, 2])
    limit = 1 + 3 * (tree.max_depth + 1)
    outputs, tally = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=limit, stop_ids=())
    assert tally.tau == tree.max_depth + 1 and tally.rounds == 3 * len(PROMPTS)
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=limit, stop_ids=())[0]
    )


def test_drawn_drafts_of_all_layers_are_accepted_too() -> None:
    target, drafter = made(layers=[0, 1, 2], own=ALL)
    plan = Plan(Tree.chain(3), Policy(1.0))
    assert decode(target, drafter, PROMPTS, plan, max_new_tokens=1 + 3 * 4, stop_ids=())[1].tau == 4


@pytest.mark.field("F52")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("family", "origin"),
    [
        *((family, "cut") for family in load.TINY),
        *(("llama", origin) for origin in ORIGINS if origin != "cut"),
    ],
)
def test_greedy_output_is_the_targets_own(family: str, origin: str, tree: str) -> None:
    target, drafter = made(family, **ORIGINS[origin])
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
        (Plan(Tree.chain(3), Policy(1.0)), {"layers": [0]}),
        (Plan(Tree.expansion([3, 2]), Policy(0.7)), {"layers": [0]}),
        (Plan(Tree.expansion([2, 2]), Policy(1.0), sampled=False), {"layers": 1}),
        (Plan(Tree.chain(2), Policy(1.0)), {"layers": [1], "draft_ids": [0, 1, 3, 4, 6]}),
    ],
    ids=["chain", "tree", "one-hot", "reduced vocabulary"],
)
def test_sampled_text_follows_the_targets_distribution(
    plan: Plan, settings: dict[str, Any]
) -> None:
    target = load.tiny(**SMALL)  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert p_value(target, make(Ssm, target, **settings).eval(), plan, rows=5000) > 1e-3


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


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.field("F39")
@pytest.mark.parametrize("tree", ["chain", "tree"])
@pytest.mark.parametrize("family", load.TINY)
def test_after_every_round_the_cache_holds_one_plain_forward(
    family: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a refused branch may stay in it, and nothing of the text may be missing."""
    target, drafter = made(family)
    rounds: list[tuple[list[int], Tensor]] = []
    extend = Ssm.extend

    def spy(self: Ssm, state: Any, committed: Committed, depth: int) -> tuple[Tensor, Candidates]:
        hidden, candidates = extend(self, state, committed, depth)
        rounds.append((state.cache.lengths.tolist(), candidates.logits[:, 0].clone()))
        return hidden, candidates

    monkeypatch.setattr(Ssm, "extend", spy)
    outputs, _ = decode(target, drafter, PROMPTS, Plan(TREES[tree]), max_new_tokens=12, stop_ids=())
    full = [
        torch.tensor([prompt + output.ids]) for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    assert rounds[0][0] == [len(prompt) + 1 for prompt in PROMPTS]
    compared = 0
    with torch.inference_mode():
        for lengths, logits in rounds:
            if len(lengths) < len(PROMPTS):
                continue  # rows have left
            for text, known, found in zip(full, lengths, logits, strict=True):
                plain = drafter.head(drafter.network.full_pass(text[:, :known])[:, -1])[0]
                torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
                compared += 1
    assert compared >= 6


@pytest.mark.parametrize("family", load.TINY)
def test_every_drafted_node_equals_a_plain_forward_over_its_path(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and masks of drafted nodes, also where a window slides over them."""
    _, drafter = made(family)
    tree, read = Tree.expansion([2, 2, 2, 1]), []
    expand = Ssm.expand

    def spy(self: Ssm, *arguments: Any) -> tuple[Tensor, Candidates]:
        hidden, candidates = expand(self, *arguments)
        read.append(candidates.logits)
        return hidden, candidates

    monkeypatch.setattr(Ssm, "expand", spy)
    prompts, lengths = (
        torch.randint(3, 320, (2, 31), generator=torch.Generator().manual_seed(1)),
        torch.tensor([31, 17]),
    )
    with torch.inference_mode():
        state = drafter.open(2, 64)
        committed = Committed(Features(), prompts[:, 1:], lengths - 1, first=prompts[:, 0])
        proposal = drafter.propose(state, committed, tree, Policy(), None)
        assert state.cache.lengths.tolist() == [31, 17]
        compared = 0
        for logits, nodes in zip(read, tree.levels(), strict=False):
            for place, node in enumerate(nodes):
                path, at = [], node
                while at >= 0:
                    path.insert(0, at)
                    at = tree.parents[at]
                for b, length in enumerate(lengths.tolist()):
                    text = torch.cat((prompts[b, :length], proposal.tokens[b, path]))[None]
                    plain = drafter.head(drafter.network.full_pass(text)[:, -1])[0]
                    torch.testing.assert_close(logits[b, place], plain, rtol=1e-3, atol=1e-3)
                    compared += 1
    assert compared == 2 * (2 + 4 + 8)


@pytest.mark.field("F09")
@pytest.mark.parametrize("origin", ORIGINS)
def test_the_loss_of_every_label_by_hand(origin: str) -> None:
    """Row i predicts x_{i+1} against the target's distribution there; the weight is the label's
    mask."""
    weights = {"forward_kl": 0.5, "reverse_kl": 0.25, "total_variation": 2.0, "cross_entropy": 1.0}
    target, drafter = made(**ORIGINS[origin], loss=weights, chunk=3)
    ids, mask = [10, 11, 12, 13, 14, 20, 22, 24, 27], [0, 1, 0, 0, 0, 1, 1, 1, 1]
    short = row([5, 6, 7, 8], [0, 0, 1, 1], 1)
    batch = collate([row(ids, mask), short])
    loss = drafter.loss(batch, features(target, batch))
    kept = slice(None) if drafter.draft_ids is None else drafter.draft_ids
    sums, right = dict.fromkeys(weights, 0.0), 0
    for text, labels, _ in (row(ids, mask), short):
        with torch.no_grad():
            p = target.model(input_ids=text[None]).logits[0].float()[:, kept].softmax(-1)
            q = drafter.model(input_ids=text[None]).logits[0].float()[:, kept].softmax(-1)
        for i in range(len(text) - 1):
            if not labels[i + 1]:
                continue
            place = int(drafter.to_draft_ids(text[i + 1]))
            sums["forward_kl"] += float((p[i] * (p[i] / q[i]).log()).sum())
            sums["reverse_kl"] += float((q[i] * (q[i] / p[i]).log()).sum())
            sums["total_variation"] += float((p[i] - q[i]).abs().sum() / 2)
            sums["cross_entropy"] -= float(q[i, place].log()) if place >= 0 else 0.0
            right += int(q[i].argmax()) == place
    assert int(loss.count) == 7
    for name, value in sums.items():
        assert float(loss.parts[name][0]) == pytest.approx(value, rel=1e-3, abs=1e-3)
        assert int(loss.parts[name][1]) == 7
    assert float(loss.total.detach()) == pytest.approx(
        sum(weights[name] * value for name, value in sums.items()), rel=1e-3
    )
    assert int(loss.parts["accuracy"][0]) == right and set(loss.parts) == set(drafter.loss_parts)


def test_labels_count_by_their_weights() -> None:
    """A label of weight 0 is none, one of weight 2 is there twice, and the loss is divided by the
    sum of all weights."""
    target, drafter = made(layers=[0, 2], loss={"forward_kl": 1.0, "cross_entropy": 0.5})
    one, two = row([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1]), row([5, 6, 7, 8], [0, 0, 1, 1], 1)
    batch = collate([one, two])
    weights = torch.ones(2, 6)
    weights[0, 2:4], weights[1] = 0.0, 2.0
    found = drafter.loss(replace(batch, weights=weights), features(target, batch))
    found.total.backward()
    slopes = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    same = collate([row([10, 11, 12, 13, 14, 15], [0, 0, 0, 0, 1, 1]), two, two])
    expected = drafter.loss(same, features(target, same))
    expected.total.backward()
    torch.testing.assert_close(found.total, expected.total)
    assert float(found.count) == float(expected.count) == 6
    for name, p in drafter.named_parameters():
        torch.testing.assert_close(slopes[name], p.grad, rtol=1e-4, atol=1e-6)
    assert float(found.parts["forward_kl"][1]) == 6, "what is reported is the plain mean"
    nothing = drafter.loss(replace(batch, weights=torch.zeros(2, 6)), features(target, batch))
    assert float(nothing.total.detach()) == float(nothing.count) == 0.0


def test_its_own_answers_count_as_the_rows_they_replace() -> None:
    target, drafter = made(layers=[0, 2], on_policy=1.0, on_policy_tokens=4)
    batch = collate(
        [row([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1]), row([5, 6, 7, 8], [0, 0, 1, 1], 1)]
    )
    chance = torch.Generator().manual_seed(0)
    plain = drafter.loss(batch, features(target, batch), generator=chance)
    chance = torch.Generator().manual_seed(0)
    weights = torch.tensor([[3.0], [0.0]]).expand(2, 6)
    weighed = drafter.loss(
        replace(batch, weights=weights), features(target, batch), generator=chance
    )
    chance = torch.Generator().manual_seed(0)
    other = drafter.loss(
        replace(batch, weights=3.0 - weights), features(target, batch), generator=chance
    )
    torch.testing.assert_close(weighed.total + other.total, 3 * plain.total)
    assert 0 < float(weighed.total.detach()) < 3 * float(plain.total.detach())
    assert float(weighed.count + other.count) == 3 * float(plain.count)


@pytest.mark.parametrize("origin", ["cut", "cut, reduced vocabulary", "new"])
def test_the_overlap_of_every_label_by_hand(origin: str) -> None:
    target, drafter = made(**ORIGINS[origin], chunk=2)
    batch = collate(
        [row([10, 11, 12, 13, 14, 15], [0, 0, 1, 0, 1, 1]), row([5, 6, 7, 8], [0, 0, 1, 1], 1)]
    )
    found = drafter.overlap(batch, features(target, batch))
    assert found.shape == batch.input_ids.shape and not found[~batch.loss_mask].any()
    for place, label in batch.loss_mask.nonzero().tolist():
        text = batch.input_ids[place, :label][None]
        with torch.no_grad():
            p = target.model(input_ids=text).logits[0, -1].softmax(-1)
            q = drafter.head(drafter.network.full_pass(text)[:, -1:]).softmax(-1)
            q = drafter.candidates(q).spread(q)[0, 0]
        assert float(found[place, label]) == pytest.approx(
            float(torch.minimum(p, q).sum()), abs=1e-4
        )
    every = make(Ssm, target, layers=[0, 1, 2])
    torch.testing.assert_close(
        every.overlap(batch, features(target, batch))[batch.loss_mask],
        torch.ones(5),
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_gradient_is_that_of_the_plain_computation() -> None:
    target, drafter = made(layers=[0, 2], own=["norm", "head"], loss={"forward_kl": 1.0}, chunk=2)
    batch = collate([row([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1])])
    drafter.loss(batch, features(target, batch)).total.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    q = drafter.model(input_ids=batch.input_ids).logits[0, 1:-1].log_softmax(-1)
    with torch.no_grad():
        p = target.model(input_ids=batch.input_ids).logits[0, 1:-1].log_softmax(-1)
    (p.exp() * (p - q)).sum().backward()
    assert found.keys() == {name for name, _ in drafter.named_parameters()}
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("ids", [[4], [4, 5], [4, 5, 6]])
def test_short_rows_and_rows_without_labels_give_no_nan(ids: list[int]) -> None:
    target, drafter = made()
    for mask in ([0] * len(ids), [0] * (len(ids) - 1) + [int(len(ids) > 1)]):
        batch = collate([row(ids, mask)])
        loss = drafter.loss(batch, features(target, batch))
        loss.total.backward()
        assert torch.isfinite(loss.total) and int(loss.count) == sum(mask)
        assert all(
            p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in drafter.parameters()
        )


@pytest.mark.field("F33")
def test_padding_changes_nothing() -> None:
    target, drafter = made("mistral")
    rows = [row(list(range(9, 48)), [0, 0] + [1] * 37), row([5, 6, 7, 8], [0, 0, 1, 1], 1)]
    both, apart = collate(rows), [collate([one]) for one in rows]
    with torch.no_grad():
        together = drafter.loss(both, features(target, both))
        single = [drafter.loss(one, features(target, one)) for one in apart]
    torch.testing.assert_close(
        together.total, single[0].total + single[1].total, rtol=1e-4, atol=1e-4
    )


def test_a_loss_on_the_text_needs_no_features() -> None:
    _, drafter = made(layers=[0, 2], loss={"cross_entropy": 1.0, "forward_kl": 0.0})
    assert drafter.needs == Needs() and made()[1].needs == Needs(last_hidden=True)
    batch = collate([row([10, 11, 12, 13], [0, 0, 1, 1])])
    loss = drafter.loss(batch, Features())
    logits = drafter.model(input_ids=batch.input_ids).logits[0, 1:3]
    torch.testing.assert_close(
        loss.total,
        torch.nn.functional.cross_entropy(logits, torch.tensor([12, 13]), reduction="sum"),
    )


def test_guesses_are_what_is_drafted_after_the_text() -> None:
    target, drafter = made()
    outputs, tally = decode(
        target, drafter, PROMPTS[:1], Plan(Tree.chain(1)), max_new_tokens=24, stop_ids=()
    )
    ids = PROMPTS[0] + outputs[0].ids
    batch = collate([row(ids, [0] * len(PROMPTS[0]) + [1] * len(outputs[0].ids))])
    guesses = drafter.guesses(batch, Features())[0, :, 0]
    assert guesses[: len(PROMPTS[0])].tolist() == [-1] * len(PROMPTS[0])
    place = len(PROMPTS[0]) + 1
    for _, kept in outputs[0].runs[1:-1]:
        assert (int(guesses[place]) == ids[place]) == (kept == 1)
        place += kept + 1
    assert tally.rounds > 10


@pytest.mark.field("F33")
@pytest.mark.parametrize("family", load.TINY)
def test_guesses_of_joined_rows_are_those_of_the_rows_by_themselves(family: str) -> None:
    """A row's first token follows nothing of its own: none is guessed for it, marked or not."""
    _, drafter = made(family)
    rows = [
        row(list(range(9, 25)), [0, 0] + [1] * 14),
        row([5, 6, 7, 8], [1, 0, 1, 1], 1),
        row([30], [1], 2),
        row(list(range(60, 70)), [0] * 5 + [1] * 5, 3),
    ]
    batch = join(rows, 24)
    guesses = taken_apart(drafter.guesses(batch, Features()), batch)
    for one, found in zip(rows, guesses, strict=True):
        assert torch.equal(found, drafter.guesses(collate([one]), Features())[0])
        assert torch.equal(found[1:, 0] >= 0, one[1][1:]) and int(found[0]) == -1


def test_it_learns_a_text_by_distillation() -> None:
    target, drafter = made(layers=2)
    (output,), _ = decode(target, None, PROMPTS[:1], PLAIN, max_new_tokens=40, stop_ids=())
    batch = collate([row(PROMPTS[0] + output.ids, [0] * 4 + [1] * 40)])
    true, frozen = (
        features(target, batch),
        {name: p.clone() for name, p in target.model.named_parameters()},
    )
    before = decode(
        target, drafter, PROMPTS[:1], Plan(Tree.chain(4)), max_new_tokens=40, stop_ids=()
    )[1].tau
    adam = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(60):
        adam.zero_grad()
        loss = drafter.loss(batch, true)
        (loss.total / loss.count).backward()
        adam.step()
    after = decode(
        target, drafter, PROMPTS[:1], Plan(Tree.chain(4)), max_new_tokens=40, stop_ids=()
    )[1].tau
    assert before is not None and after is not None and before < 1.5 and after > 3
    assert all(torch.equal(p, frozen[name]) for name, p in target.model.named_parameters())


# --- what it owns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", load.TINY)
def test_a_cut_owns_only_its_layers(family: str) -> None:
    target, drafter = made(family)
    drafter.head(torch.zeros(1, target.width))
    copied = [p for layer in (0, 2) for p in target.decoder_layers[layer].parameters()]
    assert sum(p.numel() for p in drafter.parameters()) == sum(p.numel() for p in copied)
    assert len([module for module in drafter.modules() if isinstance(module, Lent)]) == 3
    for mine, theirs in zip(
        drafter.network.decoder_layers,
        (target.decoder_layers[0], target.decoder_layers[2]),
        strict=True,
    ):
        for (name, a), (other, b) in zip(
            mine.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert (
                name == other
                and torch.equal(a, b)
                and a.data_ptr() != b.data_ptr()
                and a.requires_grad
            )
    assert drafter.describe()["borrowed"] == "embedding, norm, head"


def test_tied_parts_are_one() -> None:
    target = load.tiny(tie_word_embeddings=True)
    assert target.output.weight is target.embedding.weight
    together = make(Ssm, target, layers=[0], own=ALL)
    assert (
        together.network.output.weight
        is together.network.embedding.weight
        is not target.embedding.weight
    )
    apart = make(Ssm, target, layers=[0], own=["head"])
    assert (
        apart.network.embedding.weight is target.embedding.weight
        and apart.network.output.weight is not target.output.weight
    )
    assert owns_all(together) and not owns_all(apart) and not owns_all(make(NGram, target))
    both = Ensemble(target, members=[make(NGram, target), apart])
    assert not owns_all(both)


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_copy_for_decoding_is_the_same_drafter(origin: str) -> None:
    target, drafter = made(**ORIGINS[origin])
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.01)
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        same = drafter.at(torch.float32)
        assert torch.equal(
            same.head(same.network.full_pass(ids)), drafter.head(drafter.network.full_pass(ids))
        )
        half = drafter.at(torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in half.model.buffers() if b.is_floating_point()} <= {torch.float32}
        assert half.network.full_pass(ids).dtype == torch.bfloat16
    outputs, _ = decode(target, half, PROMPTS, Plan(Tree.chain(3)), max_new_tokens=8, stop_ids=())
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=8, stop_ids=())[0]
    )


def test_a_target_in_low_precision_lends_in_the_drafters_dtype() -> None:
    target = load.tiny(dtype="bfloat16")
    drafter = make(Ssm, target, layers=[0, 2])
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert drafter.network.full_pass(torch.arange(3, 9)[None]).dtype == torch.float32


def test_dropout_of_the_family_is_left_out() -> None:
    """It would draw from a source that a resumed run does not put back."""
    target = load.tiny(family="gpt_neox", hidden_dropout=0.3, attention_dropout=0.3)
    for settings in ({"layers": [0, 2]}, {"layers": 2}):
        drafter = make(Ssm, target, **settings).train()  # type: ignore[arg-type]
        ids = torch.arange(3, 12)[None]
        with torch.no_grad():
            assert torch.equal(drafter.network.full_pass(ids), drafter.network.full_pass(ids))


# --- from a directory -----------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    load.tiny(family="qwen2", width=32, layers=2, seed=3).model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_directory_of_another_family_drafts(directory: Path) -> None:
    target = load.tiny()
    drafter = make(Ssm, target, path=str(directory)).eval()
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        theirs = load.tiny(family="qwen2", width=32, layers=2, seed=3).model(input_ids=ids).logits
        torch.testing.assert_close(drafter.head(drafter.network.full_pass(ids)), theirs)
    settings = drafter.settings()
    assert settings["path"] is None and json.loads(json.dumps(settings)) == settings
    again = drafter.at(torch.float32)
    assert torch.equal(again.network.full_pass(ids), drafter.network.full_pass(ids))
    outputs, _ = decode(target, again, PROMPTS, Plan(TREES["tree"]), max_new_tokens=8, stop_ids=())
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=8, stop_ids=())[0]
    )


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    load.tiny(vocab_size=300).model.save_pretrained(tmp_path / "fewer")
    with pytest.raises(InputError, match=said("drafter.other_vocabulary")):
        make(Ssm, load.tiny(), path=str(tmp_path / "fewer"))


def test_another_tokenizer_is_refused_and_the_same_is_taken(directory: Path) -> None:
    target = tiny_chat_target()
    tiny_tokenizer().save_pretrained(directory)
    assert make(Ssm, target, path=str(directory)).network.vocab_size == 320
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    other.save_pretrained(directory)
    with pytest.raises(InputError, match=said("drafter.other_tokenizer")):
        make(Ssm, target, path=str(directory))


@pytest.mark.field("F75")
def test_a_tokenizer_with_another_normaliser_is_refused(directory: Path) -> None:
    other = tiny_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Replace("?", "!")
    other.save_pretrained(directory)
    words = said("drafter.other_tokenizer") + r".*normaliser.*the text \"\?\" has other ids"
    with pytest.raises(InputError, match=words):
        make(Ssm, tiny_chat_target(), path=str(directory))


@pytest.mark.field("F67")
def test_pickled_weights_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"drafter.path=.*pytorch_model\.bin"):
        make(Ssm, load.tiny(), path=str(directory))
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=said("drafter.no_weights")):
        make(Ssm, load.tiny(), path=str(directory))


@pytest.mark.field("F68")
def test_code_of_a_directory_is_not_run(directory: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(directory / 'marker')!r}).touch()\n"
    (directory / "configuration_mystery.py").write_text(code)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mystery",
                "auto_map": {"AutoConfig": "configuration_mystery.MysteryConfig"},
            }
        )
    )
    with pytest.raises(InputError, match=said("drafter.own_code")):
        make(Ssm, load.tiny(), path=str(directory))
    with pytest.raises(InputError, match="config: needs"):
        make(
            Ssm,
            load.tiny(),
            config={
                "model_type": "llama",
                "auto_map": {"AutoConfig": "configuration_mystery.MysteryConfig"},
            },
        )
    assert not (directory / "marker").exists()


def edit(directory: Path, **changes: Any) -> None:
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(found | changes))


def test_an_adapter_next_to_the_weights_is_refused(directory: Path) -> None:
    """transformers would read its weights, pickled or not, and name another model's."""
    (directory / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "somewhere/else", "peft_type": "LORA"}'
    )
    with pytest.raises(InputError, match=said("drafter.adapter_held")):
        make(Ssm, load.tiny(), path=str(directory))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"attn_implementation": "someone/kernel"}, "foreign_kernel"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"model_type": "t5"}, "no_causal_lm"),
        ({"model_type": "bogus"}, "unreadable_config"),
        ({"num_hidden_layers": 3}, "tensors_lacking"),
    ],
)
def test_unfit_directories_are_refused(
    directory: Path, changes: dict[str, Any], fault: str
) -> None:
    edit(directory, **changes)
    with pytest.raises(InputError, match=said(f"drafter.{fault}")):
        make(Ssm, load.tiny(), path=str(directory))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, said("drafter.no_origin")),
        ({"layers": [0], "path": "x"}, said("drafter.two_origins")),
        ({"layers": [0, 3]}, r"layers=\[0, 3\]: .* from 0 to 2"),
        ({"layers": [-1]}, r"layers=\[-1\]"),
        ({"layers": [1, 0]}, r"layers=\[1, 0\]"),
        ({"layers": [1, 1]}, r"layers=\[1, 1\]"),
        ({"layers": []}, r"layers=\[\]"),
        ({"layers": [True]}, r"layers=\[True\]"),
        ({"layers": "4"}, "layers=4"),
        ({"layers": 1.5}, "layers=1.5"),
        ({"layers": 0}, "layers=0: .* from 1 to 1024"),
        ({"layers": 5000}, "layers=5000"),
        ({"path": "/nowhere"}, "drafter.path=/nowhere"),
        ({"layers": [0], "own": ["nose"]}, r"own=\['nose'\]"),
        ({"layers": [0], "own": "head"}, "own=head"),
        ({"layers": [0], "own": 5}, "own=5"),
        ({"path": 5}, "drafter.path=5"),
        ({"layers": 2, "own": ["head"]}, r"own=\['head'\]"),
        ({"layers": [0], "width": 32}, "width=32"),
        ({"layers": 2, "width": 30}, "width=30"),
        ({"layers": 2, "heads": 3}, "heads=3"),
        ({"layers": 2, "kv_heads": 3}, "kv_heads=3"),
        ({"layers": 2, "mlp": 0}, "mlp=0"),
        ({"layers": 2, "draft_ids": [1, 2, 3]}, said("drafter.own_head")),
        ({"layers": [0], "own": ["head"], "draft_ids": [1, 2, 3]}, said("drafter.own_head")),
        ({"config": {"model_type": "bogus"}}, said("drafter.config_of_no_model")),
        ({"config": {"hidden_size": 8}}, "config: needs"),
        ({"layers": [0], "loss": {"mse": 1.0}}, "loss mse"),
        ({"layers": [0], "loss": {"forward_kl": 0.0}}, said("drafter.no_loss")),
        ({"layers": [0], "loss": {"forward_kl": -1.0}}, r"loss\.forward_kl=-1\.0"),
        ({"layers": [0], "loss": "forward_kl"}, "loss=forward_kl"),
        ({"layers": [0], "beta": 1.0}, r"beta=1\.0"),
        ({"layers": [0], "chunk": 0}, "chunk=0"),
        ({"layers": [0], "on_policy": 1.5}, r"on_policy=1\.5"),
        ({"layers": [0], "on_policy_tokens": 0}, "on_policy_tokens=0"),
        ({"layers": [0], "on_policy_temperature": -1.0}, "temperature is -1"),
        ({"layers": [0], "on_policy": 0.5, "loss": {"cross_entropy": 1.0}}, "on_policy: "),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make(Ssm, load.tiny(), **settings)
