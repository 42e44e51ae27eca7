"""MTP: alignment of every step, the steps that training and drafting share, gradients, families,
vocabulary, and an overfitted sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.mtp import Mtp
from drafttrain.drafter.vocabulary import most_frequent
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn.mixture import mixed_rows
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter import make as drafters
from tests.drafter.contract import TREES
from tests.families import AFTER, EXPERTS, target_of

ACCURACIES = ("accuracy", "accuracy_2", "accuracy_3")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox")


def make(
    family: str = "llama", dtype: torch.dtype = torch.float32, **settings
) -> tuple[Target, Mtp]:
    target = load.tiny(family=family) if family in FAMILIES else target_of(family)
    torch.manual_seed(0)
    drafter = drafters.make(Mtp, target, **settings).eval()
    return target, drafter.to(dtype)


def row(ids, mask) -> Batch:
    return collate([(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), 0)])


def features(target: Target, batch: Batch, dtype: torch.dtype = torch.float32) -> Features:
    found = target.features(batch.input_ids, batch.lengths, Needs(last_hidden=True)).last_hidden
    return Features(found.clone().to(dtype))


def text(rows: int = 2, n: int = 11) -> Batch:
    ids = torch.randint(3, 97, (rows, n), generator=torch.Generator().manual_seed(3))
    return collate([(x, torch.arange(n) > 2 + i, i) for i, x in enumerate(ids)])


def chained(
    drafter: Mtp, hidden: Tensor, ids: Tensor, i: int, steps: int, detach: bool
) -> list[Tensor]:
    """(d) each: what the module says of row i, its own outputs added one by one as drafting does;
    in one causal pass for each step."""
    read, found = hidden[:, : i + 1], []
    for step in range(steps):
        end = i + 2 + step
        if end > ids.shape[1]:
            break
        out = drafter(read, ids[:, 1:end], torch.arange(end - 1)[None])[:, -1:]
        found.append(out[0, 0])
        read = torch.cat((read, out.detach() if detach else out), 1)
    return found


# The table ----------------------------------------------------------------------------------------
@pytest.mark.field("F09")
def test_alignment_of_five_prompt_and_four_answer_tokens(monkeypatch):
    """What each step reads, at which positions, and the labels that it learns."""
    target, drafter = make()
    ids = [10, 11, 12, 13, 14, 20, 21, 22, 23]
    batch = row(ids, [0] * 5 + [1] * 4)
    true, seen, judged = features(target, batch), [], {}
    forward = Mtp.forward

    def spy(self, hidden, tokens, positions, mask=None, cache=None):
        out = forward(self, hidden, tokens, positions, mask, cache)
        seen.append((hidden[0], tokens[0].tolist(), positions[0].tolist(), out[0]))
        return out

    def judge(read, labels, head, terms, *, goal, note, weights, valid, trained, chunk):
        judged.update(read=read, valid=valid, weights=weights, labels=labels, goal=goal)
        return mixed_rows(
            read,
            labels,
            head,
            terms,
            goal=goal,
            note=note,
            weights=weights,
            valid=valid,
            trained=trained,
            chunk=chunk,
        )

    monkeypatch.setattr(Mtp, "forward", spy)
    monkeypatch.setattr("drafttrain.drafter.unrolling.mixed_rows", judge)
    loss = drafter.loss(batch, true)
    assert len(seen) == 3
    for step, (hidden, tokens, positions, _) in enumerate(seen):
        real = 7 - step  # rows that have a label
        assert tokens[:real] == ids[1 + step : 8]
        assert positions == list(range(step, step + 7))
        expected = seen[step - 1][3] if step else true.last_hidden[0, :7]
        torch.testing.assert_close(hidden, expected)
    assert judged["labels"].tolist() == [20, 21, 22, 23] and int(loss.count) == 4
    assert judged["valid"].all()
    for step in range(3):  # row i of step j learns x_{i+2+j}: label x_5 is row 3 - j's
        torch.testing.assert_close(judged["read"][:, step], seen[step][3][3 - step : 7 - step])
    torch.testing.assert_close(judged["weights"], torch.tensor([[25, 15, 9]]).expand(4, -1) / 49)
    with torch.no_grad():
        soft = target.head(true.last_hidden[0, 4:8])
        torch.testing.assert_close(judged["goal"](slice(None)).logits, soft, rtol=1e-4, atol=1e-4)


@pytest.mark.field("F09", "F33")
def test_no_label_from_padding_or_beyond_the_end():
    """The first labels of a row are reached by the first steps only."""
    target, drafter = make()
    short, long = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]
    rows = [
        (torch.tensor(x), torch.tensor([0, 0] + [1] * (len(x) - 2), dtype=torch.bool), i)
        for i, x in enumerate((short, long))
    ]
    both = collate(rows)
    together = drafter.loss(both, features(target, both))
    apart = [drafter.loss(b, features(target, b)) for b in (collate([r]) for r in rows)]
    assert int(together.count) == sum(int(a.count) for a in apart) == 7
    assert [float(together.parts[name][1]) for name in ACCURACIES] == [7, 5, 3]
    torch.testing.assert_close(together.total, sum(a.total for a in apart))


@pytest.mark.field("F10", "F11", "F39")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_every_step_reproduces_drafting_row_by_row(family):
    """In float64, through the cache that drafting uses: no more than rounding apart."""
    target, drafter = make(family, torch.float64, steps=4)
    batch = text()
    true = features(target, batch, torch.float64)
    with torch.no_grad():
        outs = drafter.unrolled(batch, true)
        for b, ids in enumerate(batch.input_ids):
            for i in range(len(ids) - 2):
                state = drafter.open(1, 32)
                read = Features(true.last_hidden[b : b + 1, : i + 1])
                known = Committed(read, ids[None, 1 : i + 2], torch.tensor([i + 1]))
                hidden, _ = drafter.extend(state, known, 4)
                for step in range(4):
                    gap = (outs[step][b, i] - hidden[0, 0]).abs().max()
                    assert float(gap) < 1e-10, (b, i, step)
                    if i + 4 + step > len(ids):
                        break
                    mask = torch.ones(1, 1, step + 1, dtype=torch.bool)
                    token = ids[None, i + 2 + step : i + 3 + step]
                    hidden, _ = drafter.expand(state, token, hidden, step + 1, mask)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
def test_gradients_are_those_of_a_plain_loop(detach, own_head):
    target, drafter = make(dtype=torch.float64, detach=detach, own_head=own_head)
    batch = text()
    true = features(target, batch, torch.float64)
    drafter.loss(batch, true).total.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for b, ids in enumerate(batch.input_ids):
        hidden = true.last_hidden[b : b + 1]
        for i in range(len(ids) - 2):
            for step, out in enumerate(chained(drafter, hidden, ids[None], i, 3, detach)):
                label = i + 2 + step
                if label < len(ids) and batch.loss_mask[b, label]:
                    q = drafter.logits(out[None]).log_softmax(-1)
                    p = drafter.head(hidden[0, label - 1 : label]).softmax(-1)
                    total = total - drafter.config.step_weights[step] * (p * q).sum()
    total.backward()
    for name, p in drafter.named_parameters():
        # The loss over a vocabulary is float32.
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)


def test_same_step_reads_the_rows_of_its_own_step():
    """FastMTP's training: each step is one causal pass over the step before."""
    target, drafter = make(attention="same_step")
    batch = text()
    true = features(target, batch)
    with torch.no_grad():
        out = true.last_hidden[:, :-2]
        for step, found in enumerate(drafter.unrolled(batch, true)):
            tokens = torch.nn.functional.pad(batch.input_ids, (0, step))[:, 1 + step :][:, :9]
            out = drafter(out, tokens, torch.arange(9)[None])
            real = 9 - step
            torch.testing.assert_close(found[:, :real], out[:, :real], rtol=1e-4, atol=1e-4)
        ttt = drafters.make(Mtp, target)
        ttt.load_state_dict(drafter.state_dict())
        assert not torch.allclose(ttt.unrolled(batch, true)[1], drafter.unrolled(batch, true)[1])


def test_the_texts_tokens_can_be_the_labels():
    """As FastMTP has it; one outside the draft vocabulary teaches nothing and counts as a miss."""
    target, drafter = make(loss={"cross_entropy": 1.0}, steps=1, draft_ids=list(range(60)))
    batch = row([50, 40, 30, 70, 20], [0, 0, 1, 1, 1])
    true = features(target, batch)
    loss = drafter.loss(batch, true)
    with torch.no_grad():
        out = drafter.unrolled(batch, true)[0][0]
        logits = drafter.logits(out)
    expected = -logits.log_softmax(-1)[[0, 2], [30, 20]].sum()
    torch.testing.assert_close(loss.total.detach(), expected)
    assert loss.parts.keys() == {"cross_entropy", "accuracy"} and float(loss.count) == 3
    assert float(loss.parts["accuracy"][1]) == 3


# Drafting -----------------------------------------------------------------------------------------
@pytest.mark.field("F74", "F98")
@pytest.mark.parametrize("family", [*FAMILIES, *AFTER, *EXPERTS, "gpt2"])
def test_any_decoder_only_family(family):
    """It drafts exact text, learns, and is made by the seed."""
    target, drafter = make(family)
    prompts = [list(range(3, 32)), [5, 6, 7]]
    limits = {"max_new_tokens": 6, "stop_ids": ()}
    plain, _ = decode(target, None, prompts, Plan(Tree.chain(0)), **limits)
    for tree in (Tree.chain(4), TREES["dynamic"]):
        found, _ = decode(target, drafter, prompts, Plan(tree), **limits)
        assert [one.ids for one in found] == [one.ids for one in plain]
    batch = row(list(range(3, 20)), [1] * 17)
    drafter.loss(batch, features(target, batch)).total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())
    other = make(family)[1].state_dict()
    assert all(torch.equal(other[name], value) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.expansion([2, 2]), TREES["dynamic"]])
def test_sampled_text_has_the_targets_distribution(tree):
    target = load.tiny(**SMALL)
    torch.manual_seed(0)
    drafter = drafters.make(Mtp, target).eval()
    assert p_value(target, drafter, Plan(tree, Policy(1.0)), rows=3000) > 1e-3


@pytest.mark.field("F10", "F35")
@pytest.mark.parametrize("settings", [{}, {"own_head": True, "draft_ids": 160}])
def test_an_overfitted_sample_is_decoded_at_full_depth(settings):
    """Acceptance stays flat over depths that were trained, and over those that were not."""
    target = load.tiny(seed=5)
    prompt = [3, 4, 5, 6, 7, 8]
    outputs, _ = decode(target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=40, stop_ids=())
    batch = row(prompt + outputs[0].ids, [0] * len(prompt) + [1] * 40)
    if "draft_ids" in settings:
        counts = torch.bincount(torch.tensor(outputs[0].ids), minlength=320)
        settings = {**settings, "draft_ids": most_frequent(counts, 160, target.stop_ids)}
    torch.manual_seed(0)
    drafter = drafters.make(Mtp, target, **settings)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    true = features(target, batch)
    for _ in range(100):
        loss = drafter.loss(batch, true)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    for name in ACCURACIES:
        hits, count = loss.parts[name]
        assert float(hits / count) > 0.97
    _, tally = decode(
        target, drafter.eval(), [prompt], Plan(Tree.chain(5)), max_new_tokens=40, stop_ids=()
    )
    assert tally.tau > 5, tally


# What it owns -------------------------------------------------------------------------------------
def test_only_what_is_trained_is_owned():
    target, drafter = make(draft_ids=list(range(100)))
    drafter.head(torch.zeros(1, target.width))
    d, ff = 64, 128
    layer = 2 * d * 64 + 2 * 2 * d * 32 + d * d + 3 * d * ff  # q, k and v, o, gated mlp
    assert sum(p.numel() for p in drafter.parameters()) == layer + 4 * d
    assert not any("rotary" in name for name in drafter.state_dict())
    _, own = make(draft_ids=list(range(100)), own_head=True)
    assert sum(p.numel() for p in own.parameters()) == layer + 4 * d + 100 * d
    assert torch.equal(own.lm_head.weight, target.output.weight[:100])


def test_at_first_it_passes_the_feature_on():
    """Up to what its layer adds: the final norm has the size of the target's features."""
    target, drafter = make()
    with torch.no_grad():
        drafter.layers[0].self_attn.o_proj.weight.zero_()
        drafter.layers[0].mlp.down_proj.weight.zero_()
        batch = text()
        hidden = features(target, batch).last_hidden
        out = drafter(hidden[:, :-1], batch.input_ids[:, 1:], torch.arange(10)[None])
    torch.testing.assert_close(out, hidden[:, :-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 65}, "steps=65"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"step_decay": 0.0}, "step_decay=0.0"),
        ({"step_decay": 1.1}, "step_decay=1.1"),
        ({"step_decay": True}, "step_decay=True"),
        ({"attention": "causal"}, "attention=causal: give ttt"),
        ({"attention": ["ttt"]}, "attention="),
        ({"detach": "no"}, "detach=no"),
        ({"own_head": 1}, "own_head=1"),
        ({"loss": "jsd"}, "loss=jsd: needs weights by name"),
        ({"loss": {"nope": 1.0}}, "loss nope"),
        ({"loss": {"forward_kl": 0.0}}, "all weights of the loss are 0"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        make(**settings)
