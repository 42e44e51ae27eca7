"""Merging by path: every origin is kept, and the text keeps the target's law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.rules import greedy, multi_step
from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.sampling import untried
from drafttrain.tree.merge import merge, without_repeats
from drafttrain.tree.topology import Tree
from tests.decoding.rounds import DRAFT, TARGET, Round, Uniform, judged, p_value
from tests.decoding.rounds import grow as drafted

OTHER = DRAFT.flip(1)
FORK = Tree.from_paths([[0], [1], [0, 0], [1, 0]])


def proposal(tokens: list[list[int]], tree: Tree, law: Sampling, v: int = 8) -> Proposal:
    ids = torch.tensor(tokens)
    parents = torch.tensor(tree.parents).expand_as(ids)
    if law is Sampling.ONE_HOT:
        return Proposal(ids, parents, law)
    q = torch.rand(len(ids), tree.size + 1, v, generator=torch.Generator().manual_seed(tree.size))
    return Proposal(ids, parents, law, q / q.sum(-1, keepdim=True), parents + 1)


def test_every_origin_and_multiplicity_is_kept() -> None:
    one = proposal(
        [[5, 6, 1, 2], [5, 5, 1, 1]], FORK, Sampling.IID
    )  # in row 1 it drew 5 twice, and 1 behind both
    two = proposal([[6, 2, 3], [5, 1, 7]], Tree.chain(3), Sampling.IID)
    merged = merge([one, two])
    assert merged.origins(0) == {
        (5,): [(0, 0)],
        (6,): [(0, 1), (1, 0)],
        (5, 1): [(0, 2)],
        (6, 2): [(0, 3), (1, 1)],
        (6, 2, 3): [(1, 2)],
    }
    assert merged.origins(1) == {
        (5,): [(0, 0), (0, 1), (1, 0)],
        (5, 1): [(0, 2), (0, 3), (1, 1)],
        (5, 1, 7): [(1, 2)],
    }
    found = merged.proposal
    assert found.sampling is Sampling.IID and found.counts is None and found.size == 7
    assert found.merged_into is not None and found.q is not None and found.q_rows is not None
    assert found.merged_into.tolist() == [[0, 1, 2, 3, 1, 3, 6], [0, 0, 2, 2, 0, 2, 6]]
    assert found.parents.tolist() == [[-1, -1, 0, 1, -1, 1, 3], [-1, -1, 0, 0, -1, 0, 2]]
    for row in range(2):
        for place in range(7):
            source = (one, two)[merged.drafter[row, place]]
            node = merged.node[row, place]
            assert source.tokens[row, node] == found.tokens[row, place]
            assert torch.equal(
                found.q[row, found.q_rows[row, place]], source.q[row, source.q_rows[row, node]]
            )


def test_equal_tokens_under_other_parents_stay_apart() -> None:
    one = proposal([[1, 2]], Tree.chain(2), Sampling.ONE_HOT)
    two = proposal([[3, 2]], Tree.chain(2), Sampling.ONE_HOT)
    merged = merge([one, two])
    assert merged.proposal.sampling is Sampling.ONE_HOT and merged.proposal.q is None
    assert len(merged.origins(0)) == 4


def test_padding_goes_to_the_end() -> None:
    one = proposal([[5, 6, 7], [5, 6, 7], [1, 0, 0]], Tree.chain(3), Sampling.IID)
    one = Proposal(
        one.tokens, one.parents, one.sampling, one.q, one.q_rows, torch.tensor([1, 3, 0])
    )
    two = proposal([[5, 4], [5, 6], [1, 2]], Tree.chain(2), Sampling.IID)
    merged = merge([one, two])
    assert merged.proposal.counts.tolist() == [3, 5, 2]
    assert merged.origins(0) == {(5,): [(0, 0), (1, 0)], (5, 4): [(1, 1)]}
    assert merged.origins(1) == {
        (5,): [(0, 0), (1, 0)],
        (5, 6): [(0, 1), (1, 1)],
        (5, 6, 7): [(0, 2)],
    }
    assert merged.origins(2) == {(1,): [(1, 0)], (1, 2): [(1, 1)]}
    found = merged.proposal
    assert (found.parents < torch.arange(5)).all()
    assert torch.equal(found.q[0, found.q_rows[0, 2]], two.q[0, two.q_rows[0, 1]])


def test_laws_of_draws_without_replacement_and_of_single_tokens() -> None:
    wor = proposal([[3, 1, 2]], Tree.expansion([3]), Sampling.WOR)
    merged = merge([wor, proposal([[1]], Tree.chain(1), Sampling.ONE_HOT)]).proposal
    laws = merged.q[0, merged.q_rows[0]]
    base = wor.q[0, :1]
    for j in range(3):
        torch.testing.assert_close(laws[j : j + 1], untried(base, wor.tokens[:, :j]).float())
    assert laws[3].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_greedy_descends_into_either_drafters_branch() -> None:
    one, two = (
        proposal([[5, 6]], Tree.chain(2), Sampling.ONE_HOT),
        proposal([[5, 7, 4]], Tree.chain(3), Sampling.ONE_HOT),
    )
    found = merge([one, two]).proposal
    argmax = torch.tensor(
        [[5, 7, 0, 0, 4, 2]]
    )  # after the anchor 5, after 5 7, after 7 4, after 4 2
    kept = greedy(argmax, found)
    assert found.tokens[0, kept.path[0]].tolist() == [5, 7, 4] and kept.next_token.item() == 2


def test_point_masses_where_a_vocabulary_is_given() -> None:
    one, two = (
        proposal([[5, 6]], Tree.chain(2), Sampling.ONE_HOT),
        proposal([[5]], Tree.chain(1), Sampling.ONE_HOT),
    )
    found = merge([one, two], vocab_size=8).proposal
    assert found.sampling is Sampling.IID and found.q is not None and found.q_rows is not None
    for node, token in enumerate((5, 6, 5)):
        assert found.q[0, found.q_rows[0, node]].tolist() == [
            float(token == other) for other in range(8)
        ]
    wor = proposal([[3, 1]], Tree.expansion([2]), Sampling.WOR)
    assert (
        merge([wor, one], vocab_size=8).proposal.q.shape[-1]
        == merge([wor, one]).proposal.q.shape[-1]
        == 8
    )  # type: ignore[union-attr]


def test_repeats_go_and_everything_else_stays_in_order() -> None:
    one = proposal([[5, 6, 1, 2], [5, 6, 1, 2]], FORK, Sampling.ONE_HOT)
    two = proposal([[6, 2, 3], [7, 2, 3]], Tree.chain(3), Sampling.ONE_HOT)
    found = without_repeats(merge([one, two]).proposal)
    assert found.tokens.tolist()[0][:5] == [5, 6, 1, 2, 3] and found.parents.tolist()[0][:5] == [
        -1,
        -1,
        0,
        1,
        3,
    ]
    assert found.tokens.tolist()[1] == [5, 6, 1, 2, 7, 2, 3] and found.parents.tolist()[1] == [
        -1,
        -1,
        0,
        1,
        -1,
        4,
        5,
    ]
    assert (
        found.counts.tolist() == [5, 7]
        and found.merged_into is None
        and found.parents[0, 5:].tolist() == [-1, -1]
    )  # type: ignore[union-attr]
    padded = Proposal(two.tokens, two.parents, two.sampling, counts=torch.tensor([1, 0]))
    found = without_repeats(merge([padded, two]).proposal)
    assert found.counts.tolist() == [3, 3] and found.tokens.tolist() == [[6, 2, 3], [7, 2, 3]]
    assert found.parents.tolist() == [[-1, 0, 1]] * 2


def test_what_cannot_be_merged() -> None:
    one = proposal([[5, 6]], Tree.chain(2), Sampling.IID)
    with pytest.raises(InputError, match="nothing to merge"):
        merge([])
    with pytest.raises(InputError, match="proposal 1 is merged already"):
        merge([one, merge([one]).proposal])
    with pytest.raises(InputError, match="does not say how"):
        merge([Proposal(one.tokens, one.parents, Sampling.UNKNOWN)])
    with pytest.raises(InputError, match="without q"):
        merge([one, Proposal(one.tokens, one.parents, Sampling.IID)])


# --- the law of text ------------------------------------------------------------------------------


def by(table: Tensor, tree: Tree, law: Sampling, last: Tensor, uniform: Uniform) -> Proposal:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.decoding.rounds.DRAFT", table)
        return drafted(tree, law, last, uniform)


def two_drafters(
    first: tuple[Tree, Sampling], second: tuple[Tree, Sampling], *, joined: bool = False
) -> Round:
    def one_round(last: Tensor, uniform: Uniform):
        # Two drafters that are alike often propose the same token.
        tables = (DRAFT, DRAFT if joined else OTHER)
        drafts = [
            by(table, *how, last, uniform)
            for table, how in zip(tables, (first, second), strict=True)
        ]
        found = merge(drafts).proposal
        if not joined:
            return judged(multi_step, found, last, uniform)
        # A mistake: a token that the second drafter repeats is not judged again.
        twice = found.merged_into != torch.arange(found.size)
        table = found.q.gather(1, found.q_rows[:, :, None].expand(-1, -1, 4))
        table[twice] = 1e-30
        p_row = Proposal(
            found.tokens,
            found.parents,
            Sampling.IID,
            table,
            torch.arange(found.size).expand_as(found.tokens),
        )
        u = uniform(found.size + 1)
        u[:, :-1] = torch.where(twice, 2.0, u[:, :-1])
        return found.tokens, multi_step(
            TARGET[torch.cat((last[:, None], found.tokens), 1)], p_row, u
        )

    return one_round


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Tree.chain(2), Sampling.IID), (Tree.chain(2), Sampling.IID)),
        ((Tree.expansion([2, 1]), Sampling.WOR), (Tree.chain(2), Sampling.ONE_HOT)),
    ],
    ids=["two chains", "a tree and a deterministic chain"],
)
def test_merged_trees_write_the_targets_law(
    first: tuple[Tree, Sampling], second: tuple[Tree, Sampling]
) -> None:
    assert p_value(two_drafters(first, second), 50_000) > 1e-3


def test_joining_equal_proposals_does_not() -> None:
    chain = (Tree.chain(2), Sampling.IID)
    assert p_value(two_drafters(chain, chain, joined=True), 150_000) < 1e-6


def mismerged(mistake: str) -> Round:
    """Two chains, made or ordered as they must not be."""

    def one_round(last: Tensor, uniform: Uniform):
        numbers = uniform(2)

        def again() -> Uniform:
            columns = iter(numbers.split(1, 1))
            return lambda k: next(columns)

        if mistake == "chance shared":
            one, two = (
                by(table, Tree.chain(2), Sampling.IID, last, again()) for table in (DRAFT, OTHER)
            )
        else:
            one, two = (
                by(table, Tree.chain(2), Sampling.IID, last, uniform) for table in (DRAFT, OTHER)
            )
            # In every row the drafter whose first token is likelier by its own law is judged first.
            sure = [x.q[:, 0].gather(1, x.tokens[:, :1]) for x in (one, two)]  # type: ignore[index]
            swap = sure[1] > sure[0]  # b 1

            def chosen(a: Proposal, b: Proposal) -> Proposal:
                q = torch.where(swap[..., None], b.q, a.q)  # type: ignore[call-overload]
                return Proposal(
                    torch.where(swap, b.tokens, a.tokens), a.parents, a.sampling, q, a.q_rows
                )

            one, two = chosen(one, two), chosen(two, one)
        return judged(multi_step, merge([one, two]).proposal, last, uniform)

    return one_round


@pytest.mark.parametrize("mistake", ["judged by confidence", "chance shared"])
def test_an_order_by_confidence_and_shared_chance_are_noticed(mistake: str) -> None:
    assert p_value(mismerged(mistake), 50_000) < 1e-6
