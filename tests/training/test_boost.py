"""Boost-tuning on hand-made rows: what is matched, what is left, what the next model sees and when
it ends, by exact numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.target.model import Target
from drafttrain.training.boost import Boost
from drafttrain.training.left import Left
from drafttrain.training.references import Reference, matched, references
from drafttrain.training.tuning import Collective, Fit, Tuning, line
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said

BOOST: dict[str, Any] = {
    "members": 3,
    "reference": 4,
    "match": 2,
    "marking": "fitted",
    "folds": 2,
    "removal": "hard",
    "eta": 2.0,
    "begin": "fresh",
    "least_left": 0.0,
    "least_gain": 0.0,
    "nodes": None,
    "share_new_tokens": 16,
}
ROWS = 8
ABOUT: dict[str, Any] = {
    "target": {"name": "t", "fingerprint": {"dtype": "float32"}},
    "prompts": {},
    "writing": {},
}


@pytest.fixture
def rows(tmp_path: Path) -> ConversationData:
    """Row i: prompt i+10, i+20; answer of four tokens 3 4 5 6 and a late token that no reference
    holds."""
    made = [Row(i, (i + 10, i + 20, 3, 4, 5, 6, 7), ((2, 7),), ("stop",), 0.0) for i in range(ROWS)]
    write_set(tmp_path / "set", made, manifest=ABOUT, held_out=0)
    return ConversationData(tmp_path / "set")


class Knows:
    """A drafter that writes the first tokens of some answers as the target does, and nothing else
    right."""

    def __init__(
        self, lengths: Mapping[int, int], overlaps: Mapping[int, float] | None = None
    ) -> None:
        self.lengths, self.overlaps = lengths, overlaps or {}

    def eval(self) -> Knows:
        return self

    def guesses(self, batch: Batch, features: Features) -> Tensor:
        found = torch.full_like(batch.input_ids, 0)
        for row, ids in enumerate(batch.input_ids.tolist()):
            start = int(batch.loss_mask[row].long().argmax())
            right = start + self.lengths.get(ids[0] - 10, 0)
            found[row, start:right] = batch.input_ids[row, start:right]
            found[row, right + 1 :] = batch.input_ids[
                row, right + 1 :
            ]  # right again after the first mistake
        return found[:, :, None]

    def overlap(self, batch: Batch, features: Features) -> Tensor:
        share = torch.tensor(
            [self.overlaps.get(ids[0] - 10, 0.0) for ids in batch.input_ids.tolist()]
        )
        return share[:, None] * batch.loss_mask


class NoFeatures:
    def features(self, batch: Batch) -> Features:
        return Features()


def tuned(
    rows: ConversationData,
    folder: Path,
    knows: Callable[[Fit], Any],
    reported: Sequence[Reference] | None = None,
    **settings: Any,
) -> tuple[Collective, list[Fit], list[str], list[dict[str, Any]]]:
    """Run the procedure with drafters that know what they are said to know."""
    jobs: list[Fit] = []
    said: list[str] = []
    noted: list[dict[str, Any]] = []

    def fit(job: Fit) -> Any:
        jobs.append(job)
        return knows(job)

    wanted = [Reference([i + 10, i + 20], [3, 4, 5, 6]) for i in range(ROWS)]
    found = Tuning(
        config=Boost(**{**BOOST, **settings}),
        data=rows,
        wanted=wanted,
        reported=wanted if reported is None else reported,
        fit=fit,
        facts=lambda job: {"seconds": 1.0, "of": job.name},
        source=NoFeatures(),
        seed=5,
        folder=folder,
        note=lambda number, row: noted.append({**row, "number": number}),
        say=said.append,
    ).run()
    return found, jobs, said, noted


def numbers(data: ConversationData) -> list[int]:
    return [int(data.row(i)[0][0]) - 10 for i in range(len(data))]


# --- references and matches -----------------------------------------------------------------------


def test_references_are_the_targets_greedy_answers(target: Target, tmp_path: Path) -> None:
    """Those of rows written greedily are read; after other prompts the target writes them. An end
    token counts."""
    prompts = [[5, 6, 7], [8, 9], [30, 31, 32, 33]]
    greedy, _ = decode(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=6, stop_ids=())
    two = [(*prompts[1], 50, 51, 52, 60, 61, 70, 71), ((2, 5), (7, 9))]
    made = [
        Row(0, (*prompts[0], *greedy[0].ids), ((3, 9),), ("length",), 0.0),
        Row(1, two[0], two[1], ("stop", "stop"), 0.0),  # type: ignore[arg-type]
        Row(2, (*prompts[2], 40, 41, 42), ((4, 7),), ("length",), 0.7),
    ]
    write_set(tmp_path / "set", made, manifest=ABOUT, held_out=0)
    data = ConversationData(tmp_path / "set")
    found = references(target, data, 5)
    assert [one.prompt for one in found] == prompts
    assert found[0].answer == greedy[0].ids[:5]
    assert found[1].answer == [50, 51, 52], "the first answer, all of it where it is shorter"
    assert found[2].answer == greedy[2].ids[:5]
    assert references(target, ConversationData(tmp_path / "set", labels="all"), 5) == found


def test_a_match_ends_at_the_first_other_token(rows: ConversationData) -> None:
    wanted = [Reference([10 + i, 20 + i], [3, 4, 5, 6][: 4 - i % 2]) for i in range(4)]
    assert matched(Knows({0: 4, 1: 2, 2: 0, 3: 3}), wanted) == [4, 2, 0, 3]
    one = Reference([1], [3, 4, 5])
    assert [one.covered(k, 2) for k in range(4)] == [False, False, True, True]
    assert [one.covered(k, None) for k in range(4)] == [False, False, False, True]
    assert one.covered(3, 16) and not one.covered(2, 16), (
        "an answer that ends earlier is matched in full"
    )


def test_what_is_matched_is_what_would_be_written(target: Target) -> None:
    """Teacher-forced guesses up to the first mistake are the drafter's own greedy text."""
    torch.manual_seed(0)
    drafter = drafters.make(Ssm, target, layers=[0]).eval()
    prompts = [[5, 6, 7], [8, 9], [30, 31, 32, 33], [100, 3], [4, 4, 4]]
    greedy, _ = decode(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=8, stop_ids=())
    own = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(8):
                ids.append(
                    int(
                        drafter.head(drafter.network.full_pass(torch.tensor([ids]))[:, -1])[
                            0
                        ].argmax()
                    )
                )
            own.append(ids[len(prompt) :])
    wanted = [Reference(prompt, output.ids) for prompt, output in zip(prompts, greedy, strict=True)]
    expected = [
        next((k for k, (a, b) in enumerate(zip(mine, one.answer, strict=True)) if a != b), 8)
        for mine, one in zip(own, wanted, strict=True)
    ]
    assert matched(drafter, wanted) == expected
    assert matched(drafters.make(Ssm, target, layers=[0, 1]), wanted) == [8] * 5, (
        "all of the target's layers"
    )


# --- what is left ---------------------------------------------------------------------------------


def test_covered_rows_are_taken_away_for_good(rows: ConversationData, tmp_path: Path) -> None:
    knows = {"member-1": {0: 2, 1: 1, 5: 4}, "member-2": {0: 4, 2: 4, 3: 3}, "member-3": {7: 4}}
    found, jobs, _, noted = tuned(rows, tmp_path, lambda job: Knows(knows[job.name]))
    assert [numbers(job.data) for job in jobs] == [[*range(8)], [1, 2, 3, 4, 6, 7], [1, 4, 6, 7]]
    assert [job.data.weights for job in jobs] == [None] * 3
    assert [(job.name, job.seed, job.member, job.begin) for job in jobs] == [
        (f"member-{k}", 4 + k, True, None) for k in (1, 2, 3)
    ]
    one, two, three = found.rows
    assert (one["coverage"], one["union"], one["gain"], one["overlap"]) == (
        0.25,
        0.25,
        0.25,
        [0.25],
    )
    assert (two["coverage"], two["union"], two["gain"], two["overlap"]) == (
        3 / 8,
        0.5,
        0.25,
        [1 / 8, 3 / 8],
    )
    assert (three["coverage"], three["union"], three["gain"], three["overlap"]) == (
        1 / 8,
        5 / 8,
        1 / 8,
        [0, 0, 1 / 8],
    )
    assert one["matched"] == one["best_single"] == one["best_of_all"] == 7 / 8
    assert (three["matched"], three["best_single"], three["best_of_all"]) == (
        4 / 8,
        11 / 8,
        (4 + 1 + 4 + 3 + 0 + 4 + 0 + 4) / 8,
    )
    assert [(row["marked"], row["marked_covered"], row["left"]) for row in (one, two)] == [
        (8, 2, 0.75),
        (6, 2, 0.5),
    ]
    assert (
        "left" not in three
        and found.ended == "all of boost.members=3 are fitted"
        and len(found.members) == 3
    )
    assert [row["number"] for row in noted] == [1, 1, 2, 2, 3] and noted[1]["left"] == 0.75


def test_full_references_unless_fewer_tokens_are_asked_for(
    rows: ConversationData, tmp_path: Path
) -> None:
    knows = {0: 4, 1: 3, 2: 1}
    for match, left in (
        (None, [1, 2, 3, 4, 5, 6, 7]),
        (3, [2, 3, 4, 5, 6, 7]),
        (1, [3, 4, 5, 6, 7]),
    ):
        _, jobs, _, _ = tuned(
            rows, tmp_path / str(match), lambda job: Knows(knows), match=match, members=2
        )
        assert numbers(jobs[1].data) == left


def test_rows_count_less_the_more_of_them_is_matched(
    rows: ConversationData, tmp_path: Path
) -> None:
    knows = {"member-1": {0: 4, 1: 2, 2: 1}, "member-2": {0: 4, 3: 4}, "member-3": {}}
    found, jobs, _, _ = tuned(rows, tmp_path, lambda job: Knows(knows[job.name]), removal="soft")
    first = [math.exp(-2), math.exp(-1), math.exp(-0.5), 1, 1, 1, 1, 1]
    second = [math.exp(-4), math.exp(-1), math.exp(-0.5), math.exp(-2), 1, 1, 1, 1]
    for job, expected in zip(jobs[1:], (first, second), strict=True):
        assert numbers(job.data) == [*range(8)] and job.data.weights is not None
        batch = job.data.batch([*range(8)])
        assert batch.weights is not None
        torch.testing.assert_close(batch.weights, torch.tensor(expected)[:, None].expand(8, 7))
    assert [row["left"] for row in found.rows[:2]] == pytest.approx(
        [sum(first) / 8, sum(second) / 8]
    )
    _, hard, _, _ = tuned(
        rows, tmp_path / "hard", lambda job: Knows({0: 4, 1: 2}), members=2, match=None
    )
    _, steep, _, _ = tuned(
        rows, tmp_path / "steep", lambda job: Knows({0: 4}), members=2, removal="soft", eta=1000.0
    )
    assert numbers(hard[1].data) == [1, 2, 3, 4, 5, 6, 7]
    assert steep[1].data.weights is not None and [float(w[0]) for w in steep[1].data.weights] == [
        0.0,
        *[1.0] * 7,
    ]


def test_labels_count_what_every_model_misses(rows: ConversationData, tmp_path: Path) -> None:
    overlaps = {"member-1": {0: 0.75, 1: 0.5}, "member-2": {0: 0.25, 2: 1.0}, "member-3": {}}
    found, jobs, _, _ = tuned(
        rows, tmp_path, lambda job: Knows({}, overlaps[job.name]), removal="token"
    )
    first, second = [0.25, 0.5, *[1.0] * 6], [0.25, 0.5, 0.0, *[1.0] * 5]
    for job, expected in zip(jobs[1:], (first, second), strict=True):
        batch = job.data.batch([*range(8)])
        assert batch.weights is not None
        labels = batch.weights[batch.loss_mask].reshape(8, 5)
        torch.testing.assert_close(labels, torch.tensor(expected)[:, None].expand(8, 5))
    assert [row["left"] for row in found.rows[:2]] == pytest.approx(
        [sum(first) / 8, sum(second) / 8]
    )


# --- who marks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folds", [2, 3])
def test_cross_fitted_rows_are_marked_by_a_model_that_did_not_see_them(
    rows: ConversationData, tmp_path: Path, folds: int
) -> None:
    """The members know all by heart, which must not count; the models of the folds know what they
    were fitted on, and row 3."""

    def knows(job: Fit) -> Knows:
        return Knows(
            dict.fromkeys(range(8), 4)
            if job.member
            else {**dict.fromkeys(numbers(job.data), 4), 3: 4}
        )

    found, jobs, _, _ = tuned(rows, tmp_path, knows, marking="cross_fitted", folds=folds, members=2)
    assert [job.name for job in jobs] == [
        "member-1",
        *(f"member-1/fold-{k + 1}" for k in range(folds)),
        "member-2",
    ]
    seen = [set(numbers(job.data)) for job in jobs[1:-1]]
    hidden = [set(range(8)) - one for one in seen]
    assert (
        set().union(*hidden) == set(range(8))
        and sum(map(len, hidden)) == 8
        and min(map(len, hidden)) >= 2
    )
    assert numbers(jobs[-1].data) == [0, 1, 2, 4, 5, 6, 7], (
        "only row 3 was known by a model that had not seen it"
    )
    assert len({job.seed for job in jobs}) == len(jobs) and not any(
        job.member for job in jobs[1:-1]
    )
    assert found.rows[0]["marked"] == 8 and found.rows[0]["marked_covered"] == 1


def test_held_out_halves(rows: ConversationData, tmp_path: Path) -> None:
    """Each model sees one half, the next what is left of the other; the last takes all that is
    left."""
    _, jobs, _, _ = tuned(rows, tmp_path, lambda job: Knows({}), marking="held_out")
    one, two, three = (set(numbers(job.data)) for job in jobs)
    assert (
        (len(one), len(two), len(three)) == (4, 2, 2) and not one & two and not (one | two) & three
    )
    assert one | two | three == set(range(8))
    _, jobs, _, _ = tuned(
        rows, tmp_path / "known", lambda job: Knows(dict.fromkeys(range(8), 4)), marking="held_out"
    )
    assert len(jobs) == 1, "nothing is left of the other half"


def test_models_that_start_where_the_last_one_ended(rows: ConversationData, tmp_path: Path) -> None:
    for begin, given in (("previous", True), ("fresh", False)):
        found, jobs, _, _ = tuned(
            rows,
            tmp_path / begin,
            lambda job: Knows({}),
            begin=begin,
            marking="cross_fitted",
            members=2,
        )
        assert [job.begin is not None for job in jobs] == [False, False, False, given]
        assert not given or jobs[-1].begin is found.members[0]


# --- when it ends ---------------------------------------------------------------------------------


def test_it_ends_when_little_is_left(rows: ConversationData, tmp_path: Path) -> None:
    knows = dict.fromkeys(range(6), 4)
    found, jobs, said, _ = tuned(rows, tmp_path, lambda job: Knows(knows), least_left=0.3)
    assert (
        len(jobs) == len(found.members) == 1
        and found.ended == "25.0% of all weight is left, less than 30.0%"
    )
    assert said[-1] == found.ended
    found, jobs, _, _ = tuned(rows, tmp_path / "enough", lambda job: Knows(knows), least_left=0.25)
    assert len(jobs) == 3
    found, jobs, _, _ = tuned(rows, tmp_path / "all", lambda job: Knows(dict.fromkeys(range(8), 4)))
    assert len(jobs) == 1 and found.ended == "no row is left"


def test_a_model_that_adds_too_little_is_left_out(rows: ConversationData, tmp_path: Path) -> None:
    knows = {"member-1": {0: 4, 1: 4}, "member-2": {1: 4, 2: 4}, "member-3": {0: 4, 2: 4}}
    found, jobs, _, _ = tuned(rows, tmp_path, lambda job: Knows(knows[job.name]), least_gain=0.1)
    assert len(jobs) == 3 and len(found.members) == 2
    assert [row["left_out"] for row in found.rows] == [False, False, True]
    assert found.rows[2]["gain"] == 0 and found.ended.startswith(
        "member 3 adds 0.0% of the rows, less than 10.0%"
    )
    first, _, said, _ = tuned(rows, tmp_path / "first", lambda job: Knows({}), least_gain=0.5)
    assert len(first.members) == 1, "the first member is kept whatever it covers"
    assert any("covers no row" in one for one in said)


def test_marks_are_read_again(rows: ConversationData, tmp_path: Path) -> None:
    """A later part of a run asks for the same fits and the same rows, without marking again."""
    settings: dict[str, Any] = {"marking": "cross_fitted", "members": 2}
    (tmp_path / "member-1" / "fold-1").mkdir(parents=True)
    one, first, _, _ = tuned(rows, tmp_path, lambda job: Knows({1: 4, 6: 4}), **settings)
    assert not (tmp_path / "member-1" / "fold-1").exists(), "what only marked rows is thrown away"
    two, second, _, _ = tuned(
        rows, tmp_path, lambda job: Knows({1: 4, 6: 4} if job.member else {}), **settings
    )
    assert (
        [job.name for job in first if job.member]
        == [job.name for job in second]
        == ["member-1", "member-2"]
    )
    assert numbers(second[-1].data) == numbers(first[-1].data) == [0, 2, 3, 4, 5, 7]
    assert second[-1].data.digest == first[-1].data.digest and one.rows == two.rows
    folds = [job.name for job in first if not job.member]
    assert [fit["of"] for fit in one.marking] == folds != [] and two.marking == one.marking, (
        "what was made earlier took time too"
    )


def test_lines_by_hand() -> None:
    wanted = [Reference([1], [1, 2, 3]), Reference([2], [1]), Reference([3], [1, 2, 3])]
    row = line([[2, 0, 1], [0, 1, 3]], wanted, 2)
    assert row["coverage"] == 2 / 3 and row["union"] == 1 and row["gain"] == pytest.approx(2 / 3)
    assert (
        row["overlap"] == [0, 2 / 3]
        and row["matched"] == row["best_single"] == 4 / 3
        and row["best_of_all"] == 2
    )
    assert line([[]], [], 2)["coverage"] == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "boost.members=0"),
        ({"reference": 2.0}, "boost.reference=2.0"),
        ({"match": 5}, "boost.match=5"),
        ({"match": True}, "boost.match=True"),
        ({"folds": 1}, "boost.folds=1"),
        ({"marking": "own"}, "boost.marking=own"),
        ({"removal": "some"}, "boost.removal=some"),
        ({"begin": "last"}, "boost.begin=last"),
        ({"eta": -1}, "boost.eta=-1"),
        ({"eta": math.inf}, "boost.eta=inf"),
        ({"least_left": 1.5}, "boost.least_left=1.5"),
        ({"least_gain": "x"}, "boost.least_gain=x"),
        ({"nodes": 0}, "boost.nodes=0"),
        ({"share_new_tokens": 4}, "boost.share_new_tokens=4"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Boost(**{**BOOST, **settings})


def test_drafters_that_cannot_be_fitted_so(target: Target) -> None:
    with pytest.raises(InputError, match=said("training.no_language_model")):
        Boost(**BOOST).check(drafters.make(Eagle1, target))
    token = Boost(**{**BOOST, "removal": "token"})
    with pytest.raises(InputError, match=said("training.reads_text_only")):
        token.check(drafters.make(Ssm, target, layers=[0], loss={"cross_entropy": 1.0}))
    with pytest.raises(InputError, match=r"boost\.removal=token.*drafter\.on_policy"):
        token.check(drafters.make(Ssm, target, layers=[0], on_policy=0.5))
    token.check(drafters.make(Ssm, target, layers=[0]))
    Boost(**BOOST).check(
        drafters.make(Ssm, target, layers=[0], loss={"cross_entropy": 1.0}, on_policy=0.0)
    )


def test_a_single_row_cannot_be_cross_fitted(rows: ConversationData, tmp_path: Path) -> None:
    single = rows.part([0])
    with pytest.raises(InputError, match=said("training.cannot_be_marked")):
        tuned(
            single,
            tmp_path,
            lambda job: pytest.fail("something was fitted"),
            marking="cross_fitted",
        )
    assert Left.all_of(single).places == [0]
    found, jobs, _, _ = tuned(
        rows, tmp_path, lambda job: Knows(dict.fromkeys(range(7), 4)), marking="cross_fitted"
    )
    assert [job.name for job in jobs if job.member] == ["member-1", "member-2"] and numbers(
        jobs[-1].data
    ) == [7]
    assert (
        len(found.members) == 2
        and found.ended == "1 rows were left, which no model fitted without them could mark"
    )
