"""Medusa's and Hydra's heads: labels, start, loss, the tokens they read, exactness, and trees
calibrated on their accuracy."""

import itertools
import json

import pytest
import torch
from torch.nn import functional

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn import losses
from drafttrain.nn.chunks import Judged
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load
from drafttrain.target.features import OnlineFeatures
from drafttrain.training.calibrate import calibrated, check_calibrated, head_accuracy
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.heads import KINDS, make
from tests.messages import said
from tests.packaging.made import packed
from tests.training.parts import write_tiny_set

PROMPTS = [[3, 5, 7, 9], [11], [20, 21, 22, 23, 24, 25, 26]]
TREES = {
    "chain": Tree.chain(3),
    "tree": Tree.expansion([3, 2, 1]),
    "dynamic": Dynamic(depth=3, top_k=3, total=8),
}


def row(ids, mask) -> Batch:
    return collate([(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), 0)])


def features(target, batch: Batch) -> Features:
    found = target.features(batch.input_ids, batch.lengths, Needs(last_hidden=True)).last_hidden
    return Features(found.clone())  # not a tensor of inference mode, which gradients cannot pass


@pytest.mark.field("F09")
@pytest.mark.parametrize("kind", KINDS)
def test_alignment_of_five_prompt_and_four_answer_tokens(kind, monkeypatch):
    """The dump (label's position, feature index, label, weight) of every head: head k reads h_t and
    predicts x_{t+k+1}."""
    target, drafter = make(kind, stir=False)
    ids = [10, 11, 12, 13, 14, 20, 21, 22, 23]
    batch = row(ids, [0] * 5 + [1] * 4)
    true = features(target, batch)
    seen = {}

    def spy(hidden, valid, weights, labels, heads, goal, loss, *, trained, chunk):
        seen.update(hidden=hidden, valid=valid, weights=weights, labels=labels)
        return Judged(
            hidden.sum(), torch.zeros(3, 1), torch.zeros(len(labels), 3, dtype=torch.int64)
        )

    monkeypatch.setattr("drafttrain.drafter.heads.losses.heads_over_vocabulary", spy)
    loss = drafter.loss(batch, true)
    dump = [
        (place, place - k - 1, int(seen["labels"][i]), round(seen["weights"][k - 1], 4))
        for i, place in enumerate(range(5, 9))
        for k in (1, 2, 3)
        if seen["valid"][i, k - 1]
    ]
    # fmt: off
    assert dump == [
        (5, 3, 20, 0.8), (5, 2, 20, 0.64), (5, 1, 20, 0.512),
        (6, 4, 21, 0.8), (6, 3, 21, 0.64), (6, 2, 21, 0.512),
        (7, 5, 22, 0.8), (7, 4, 22, 0.64), (7, 3, 22, 0.512),
        (8, 6, 23, 0.8), (8, 5, 23, 0.64), (8, 4, 23, 0.512),
    ]
    # fmt: on
    for i, place in enumerate(range(5, 9)):
        for k in (1, 2, 3):  # at the start a head passes h_t on
            torch.testing.assert_close(seen["hidden"][i, k - 1], true.last_hidden[0, place - k - 1])
    assert int(loss.count) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_every_head_starts_as_the_targets_own(kind, own_head, family):
    target, drafter = make(kind, family, stir=False, own_head=own_head, blocks=2)
    x = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(3))
    hidden = target.features(x, torch.tensor([9, 9]), Needs(last_hidden=True)).last_hidden
    for k in (1, 2, 3):
        out = drafter.outputs(hidden[:, : 9 - k], x, k)
        torch.testing.assert_close(drafter.project(out, k), target.head(hidden[:, : 9 - k]))


def plain_loss(target, drafter, batch, true, by_text):
    """Head by head and label by label, as the index table reads."""
    total, count, found = 0.0, 0, []
    for b in range(len(batch.input_ids)):
        ids, mask, hidden = batch.input_ids[b], batch.loss_mask[b], true.last_hidden[b]
        count += int(mask[2:].sum())
        for k in range(1, drafter.count + 1):
            for t in range(int(batch.lengths[b]) - k - 1):
                if not mask[t + k + 1]:
                    continue
                z = drafter.outputs(hidden[None, t : t + 1], ids[None, t : t + k + 1], k)
                logits = drafter.project(z, k)[0, 0]
                label = int(drafter.to_draft_ids(ids[t + k + 1]))
                found.append((k, label >= 0 and int(logits.argmax()) == label))
                if by_text and label >= 0:
                    total = total - drafter.config.decay**k * logits.log_softmax(-1)[label]
                elif not by_text:
                    p = drafter.head(hidden[t + k]).softmax(
                        -1
                    )  # the target's distribution of x_{t+k+1}
                    total = total - drafter.config.decay**k * (p * logits.log_softmax(-1)).sum()
    return total, count, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
@pytest.mark.parametrize("draft_ids", [None, list(range(0, 320, 2))], ids=["all", "half"])
def test_loss_and_gradients_equal_a_plain_computation(kind, own_head, loss, draft_ids):
    target, drafter = make(
        kind, own_head=own_head, loss=loss, draft_ids=draft_ids, blocks=2, chunk=3
    )
    chance = torch.Generator().manual_seed(1)
    rows = [
        (
            torch.randint(3, 300, (n,), generator=chance),
            torch.tensor([False] * (n - m) + [True] * m),
            i,
        )
        for i, (n, m) in enumerate([(12, 8), (6, 5), (4, 1)])
    ]
    batch = collate(rows)
    true = features(target, batch)
    total, count, found = plain_loss(target, drafter, batch, true, loss == "cross_entropy")
    wanted = torch.autograd.grad(total, list(drafter.parameters()), allow_unused=True)
    made = drafter.loss(batch, true)
    torch.testing.assert_close(made.total, total, rtol=1e-4, atol=1e-4)
    assert int(made.count) == count
    made.total.backward()
    for p, slope in zip(drafter.parameters(), wanted, strict=True):
        torch.testing.assert_close(
            p.grad, torch.zeros_like(p) if slope is None else slope, rtol=1e-3, atol=1e-4
        )
    for k in (1, 2, 3):
        hits = [hit for head, hit in found if head == k]
        assert made.parts[f"head_{k}_top1"] == (sum(hits), len(hits))
    with torch.no_grad():  # measuring computes the same, and no gradient
        torch.testing.assert_close(drafter.loss(batch, true).total, made.total.detach())
    assert set(made.parts) == set(drafter.loss_parts)


@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_later_heads_without_a_label_give_no_nan(kind, length):
    target, drafter = make(kind)
    batch = row([4, 5, 6, 7][:length], [0] * (length - 1) + [1])
    loss = drafter.loss(batch, features(target, batch))
    if length > 2:
        loss.total.backward()
    assert torch.isfinite(loss.total) and int(loss.count) == (length > 2)
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in drafter.parameters())
    assert [int(loss.parts[f"head_{k}_top1"][1]) for k in (1, 2, 3)] == [
        int(length > k + 1) for k in (1, 2, 3)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_owned_and_blocks_are_not_shared(kind):
    target = load.tiny()
    d = target.width

    def size(blocks):
        _, drafter = make(kind, target=target, heads=2, blocks=blocks)
        return sum(p.numel() for p in drafter.parameters())

    assert size(3) - size(2) == size(2) - size(1) == 2 * (d * d + d)
    _, drafter = make(kind, own_head=True, draft_ids=list(range(50)))
    assert sum(p.numel() for p in drafter.projections) == 3 * 50 * d
    assert {"head_rows"}.isdisjoint(drafter.state_dict())


@pytest.mark.field("F52")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", load.TINY)
@pytest.mark.parametrize("tree", TREES)
def test_greedy_output_is_the_targets_own(kind, family, tree):
    target, drafter = make(kind, family)
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=16, stop_ids=())
    stop = (plain[1].ids[9],)
    for rows, stop_ids, limit in ((1, (), 16), (3, (), 16), (3, stop, 16), (3, (), 2)):
        outputs, _ = decode(
            target,
            drafter,
            PROMPTS[:rows],
            Plan(TREES[tree]),
            max_new_tokens=limit,
            stop_ids=stop_ids,
        )
        for own, output in zip(plain, outputs, strict=False):
            end = next(
                (i + 1 for i, token in enumerate(own.ids) if token in stop_ids), len(own.ids)
            )
            assert output.ids == own.ids[: min(end, limit)]


PLANS = {
    "chain": Plan(Tree.chain(3), Policy(1.0)),
    "block": Plan(Tree.chain(3), Policy(1.0), rule="block"),
    "without replacement": Plan(Tree.expansion([3, 2]), Policy(0.8)),
    "one-hot": Plan(Tree.expansion([3, 2, 1]), Policy(1.0), sampled=False),
}


@pytest.fixture(scope="module", params=KINDS)
def small(request):
    return make(request.param, target=load.tiny(**SMALL))


@pytest.mark.field("F53")
@pytest.mark.parametrize("name", PLANS)
def test_first_three_tokens_follow_the_targets_distribution(small, name):
    assert p_value(*small, PLANS[name], rows=8000) > 1e-3


def test_typical_acceptance_changes_the_distribution(small):
    plan = Plan(Tree.expansion([3, 2, 1]), Policy(1.0), rule="typical")
    assert plan.guarantee == "approximate"
    assert p_value(*small, plan, rows=8000) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafted_node_is_what_its_head_says_of_the_path_to_it(kind):
    """Decoding feeds head k what training does: features of the last position read, the anchor and
    the drafts before."""
    target, drafter = make(kind)
    x = torch.tensor([[7, 8, 9, 10, 11]])
    hidden = target.features(x[:, :-1], torch.tensor([4]), Needs(last_hidden=True)).last_hidden
    tree = Tree.expansion([2, 2, 1])
    with torch.inference_mode():
        committed = Committed(Features(hidden), x[:, 1:], torch.tensor([4]))
        proposal = drafter.propose(drafter.open(1, 32), committed, tree, Policy(), None)
        for node in range(tree.size):
            path, k = [node], tree.depths[node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            text = [10, 11] + [
                int(proposal.tokens[0, step]) for step in path[:-1]
            ]  # x_t .. x_{t+k}
            out = drafter.outputs(hidden[:, -1:], torch.tensor([text]), k)
            choice = drafter.project(out[0, 0], k).topk(2).indices
            assert int(proposal.tokens[0, node]) == int(choice[tree.ranks[node]])


@pytest.mark.field("F10", "F35")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_head", [False, True])
def test_an_overfitted_sample_is_decoded_at_near_full_depth(kind, own_head):
    target = load.tiny(seed=5)
    prompt = [3, 4, 5, 6, 7, 8]
    outputs, _ = decode(target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=40, stop_ids=())
    batch = row(prompt + outputs[0].ids, [0] * len(prompt) + [1] * 40)
    _, drafter = make(kind, target=target, stir=False, blocks=2, own_head=own_head, decay=1.0)
    optimiser = torch.optim.Adam(drafter.train().parameters(), lr=1e-2)
    true = features(target, batch)
    for _ in range(150):
        loss = drafter.loss(batch, true)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    for k in (1, 2, 3):
        hits, count = loss.parts[f"head_{k}_top1"]
        assert float(hits / count) > 0.95
    _, tally = decode(
        target, drafter.eval(), [prompt], Plan(Tree.chain(3)), max_new_tokens=40, stop_ids=()
    )
    assert tally.tau > 3.6, tally


def test_guesses_are_each_heads_own():
    target, drafter = make()
    batch = row(list(range(10, 20)), [0] * 4 + [1] * 6)
    true = features(target, batch)
    found = drafter.guesses(batch, true)
    assert found.shape == (1, 10, 3) and bool((found[0, :4] == -1).all())
    for place, k in itertools.product(range(4, 10), (1, 2, 3)):
        out = drafter.outputs(
            true.last_hidden[:, place - k - 1 : place - k], batch.input_ids[:, : k + 1], k
        )
        assert int(found[0, place, k - 1]) == int(drafter.project(out[0, 0], k).argmax())


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_is_hits_over_the_comparisons_made(kind, tmp_path):
    target, drafter = make(kind)
    folder = write_tiny_set(target, tmp_path / "set", rows=6, held_out=1)
    data = ConversationData(folder, set_aside=3, take_set_aside=True, labels="all")
    source = OnlineFeatures(target, drafter.needs, data=data)
    found = head_accuracy(drafter, data, source, ranks=4)
    hits = [[0] * 4 for _ in range(3)]
    counts = [0] * 3
    for i in range(3):
        batch = data.batch([i])
        true = features(target, batch)
        for k in (1, 2, 3):
            for place in batch.loss_mask[0].nonzero()[:, 0].tolist():
                if place - k - 1 < 0:
                    continue
                counts[k - 1] += 1
                out = drafter.outputs(
                    true.last_hidden[:, place - k - 1 : place - k],
                    batch.input_ids[:, place - k - 1 : place],
                    k,
                )
                best = drafter.project(out[0, 0], k).topk(4).indices.tolist()
                label = int(batch.input_ids[0, place])
                if label in best:
                    hits[k - 1][best.index(label)] += 1
    assert sum(map(sum, hits)) > 0 and counts[0] > counts[1] > counts[2], (
        "labels that only the first heads reach"
    )
    for k in range(3):
        assert found[k] == pytest.approx([hit / counts[k] for hit in hits[k]])


def test_rows_set_aside_are_not_trained_on(tmp_path):
    target = load.tiny()
    folder = write_tiny_set(target, tmp_path / "set", rows=8, held_out=2)
    every = ConversationData(folder).indices
    rest = ConversationData(folder, set_aside=2).indices
    aside = ConversationData(folder, set_aside=2, take_set_aside=True).indices
    assert rest + aside == every and len(aside) == 2
    for settings in (
        {"set_aside": 6},
        {"set_aside": 7},
        {"set_aside": -1},
        {"set_aside": 1.5},
        {"take_set_aside": True},
    ):
        with pytest.raises(InputError, match="set_aside"):
            ConversationData(folder, **settings)


def test_a_calibrated_tree_is_of_the_most_likely_paths():
    accuracies = [[0.6, 0.1, 0.2], [0.4, 0.3, 0.05]]
    tree = calibrated(accuracies, 6)
    ranked = [sorted(row, reverse=True) for row in accuracies]
    worth = {(i,): ranked[0][i] for i in range(3)} | {
        (i, j): ranked[0][i] * ranked[1][j] for i, j in itertools.product(range(3), repeat=2)
    }
    assert set(tree.paths) == set(sorted(worth, key=lambda path: -worth[path])[:6])
    cartesian = Tree.expansion([2, 2])
    assert sum(worth[path] for path in tree.paths) > sum(worth[path] for path in cartesian.paths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": 2.0}, "heads=2.0"),
        ({"heads": 65}, "heads=65: .* from 1 to 64"),
        ({"blocks": 0}, "blocks=0"),
        ({"own_head": "yes"}, "own_head=yes"),
        ({"decay": 0}, "decay=0"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"loss": "mse"}, "loss mse"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_bad_settings_are_refused(kind, settings, message):
    with pytest.raises(InputError, match=message):
        make(kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 10**9}, "heads=1000000000, blocks=1 need"),
        ({"blocks": 10**9}, "heads=3, blocks=1000000000 need"),
        ({"blocks": 2}, said("drafter.tensors_missing")),
        ({"heads": 0}, "heads=0"),
        ({"loss": "mse"}, "loss mse"),
    ],
)
def test_a_package_cannot_ask_for_more_than_it_holds(kind, changes, message, tmp_path, monkeypatch):
    target, drafter = make(kind)
    package = packed(tmp_path / "package", drafter, target, plan=Plan(Tree.chain(2)))
    config = json.loads((package / "config.json").read_text())
    config["drafter"] |= changes
    (package / "config.json").write_text(json.dumps(config))
    if "need" in message:
        monkeypatch.setattr(type(drafter), "make_head", lambda *_: pytest.fail("it was built"))
    with pytest.raises(InputError, match=message):
        load_drafter(package, target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibrated_tree_that_heads_cannot_fill_is_refused(kind):
    _, drafter = make(kind, heads=2, draft_ids=[0, 1, 5, 9])
    check_calibrated(4 + 16, drafter, "final.calibrated")
    with pytest.raises(InputError, match=r"final\.calibrated=21: .* 20 nodes"):
        check_calibrated(21, drafter, "final.calibrated")
    with pytest.raises(InputError, match=r"final\.calibrated: 5000 nodes"):
        check_calibrated(5000, drafter, "final.calibrated")


@pytest.mark.field("F42")
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_deeper_than_the_heads_is_refused(kind):
    target, drafter = make(kind)
    with pytest.raises(InputError, match=said("drafter.too_deep")):
        decode(target, drafter, [[3, 4]], Plan(Tree.chain(4)), max_new_tokens=4)


def test_ranks_in_the_loss_are_places_among_the_choices():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0], [1.0, 1.0, 1.0]])
    hidden = logits[:, None].clone().requires_grad_()
    judged = losses.heads_over_vocabulary(
        hidden,
        torch.tensor([[True], [True], [False]]),
        [0.5],
        torch.tensor([2, -1, 0]),
        [lambda z: z],
        lambda part: torch.tensor([2, 0, 0])[part],
        losses.cross_entropy,
    )
    assert judged.noted[:, 0].tolist() == [1, 3, 0]
    wanted = functional.cross_entropy(logits[:2], torch.tensor([2, 0]), reduction="sum")
    torch.testing.assert_close(judged.sums[0, 0], wanted)
    torch.testing.assert_close(judged.total.detach(), 0.5 * wanted)
