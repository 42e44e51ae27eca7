"""Texts that are remembered: what is held, drafts as from a corpus of them, the target's own text,
and measurements kept apart."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Entrant, measure_acceptance, race
from drafttrain.decoding.members import followed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.remembered import (
    LOCK,
    Remembered,
    remember_texts,
    tokens_remembered,
    without_memory,
)
from drafttrain.drafter.suffix import Suffix
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.copied import copied
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.copying import TREES, propose
from tests.drafter.make import make
from tests.drafter.strings import state_of, strings

PLAIN = Plan(Tree.chain(0))
LIMIT = 30
TREE_NAMES = ["chain", "tree", "dynamic"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def own(target: Target) -> tuple[Target, list[list[int]], list[list[int]]]:
    """A target, prompts of several lengths, and its own greedy answers."""
    prompts = [[3, 5, 7, 9], [11], [20, 21, 22, 23, 24, 20, 21, 22], [40, 41]]
    plain, _ = decode(target, None, prompts, PLAIN, max_new_tokens=LIMIT, stop_ids=())
    return target, prompts, [output.ids for output in plain]


# What is held -------------------------------------------------------------------------------------


def kept(held: list[list[int]], text: Sequence[int], room: int) -> list[list[int]]:
    """The rule: the end of a text that is too long, in the place of the latest if it starts with
    that, the oldest out."""
    new = list(text)[-room:]
    held = held[:-1] if held and new[: len(held[-1])] == held[-1] else list(held)
    held.append(new)
    while sum(map(len, held)) > room:
        held.pop(0)
    return held


def some_text(chance: random.Random, alphabet: int, most: int, held: list[list[int]]) -> list[int]:
    new = [chance.randrange(alphabet) for _ in range(chance.randint(1, most))]
    return [*held[-1], *new] if held and chance.random() < 0.25 else new


@pytest.mark.parametrize("alphabet", [1, 2, 4])
def test_it_holds_the_latest_texts_and_counts_their_strings(alphabet: int) -> None:
    """Counts and the order of latest places are those of an automaton of only these texts; what has
    left counts nothing."""
    chance = random.Random(alphabet)
    left = 0
    for _ in range(8):
        room, longest = chance.randint(3, 40), chance.randint(1, 6)
        memory, held, ever = Remembered(room, longest), list[list[int]](), set[tuple[int, ...]]()
        for _ in range(40):
            text = some_text(chance, alphabet, chance.choice([3, 8, room + 3]), held)
            memory.add(text)
            held = kept(held, text, room)
            assert list(memory.texts) == held and memory.tokens == sum(map(len, held)) <= room
            known = strings(held, longest)
            ever |= known.keys()
            states = {string: state_of(memory.automaton, string) for string in known}
            assert all(
                state is not None and memory.automaton.count[state] == len(known[s])
                for s, state in states.items()
            )
            latest = {
                known[s][-1]: memory.automaton.latest[state]
                for s, state in states.items()
                if state is not None
            }
            assert all(
                memory.automaton.latest[state] == latest[known[s][-1]]
                for s, state in states.items()
                if state is not None
            )
            assert [latest[place] for place in sorted(latest)] == sorted(latest.values())
            for string in ever - known.keys():
                state = state_of(memory.automaton, string)
                left += state is not None
                assert state is None or memory.automaton.count[state] == 0, (string, held)
    assert left or alphabet == 1


def test_what_is_held_is_bounded_and_no_text_costs_a_walk_over_all() -> None:
    chance = random.Random(0)
    memory, appended = Remembered(400, 12), []
    for _ in range(300):
        text = [chance.randrange(50) for _ in range(chance.randint(5, 20))]
        sizes = {id(one): one.size for one in (memory.automaton, memory._next) if one is not None}
        memory.add(text)
        automata = [one for one in (memory.automaton, memory._next) if one is not None]
        assert sum(one.size for one in automata) <= 3 * 400 + 60
        assert sum(len(one.link) for one in automata) < 2 * (3 * 400 + 60)
        appended.append(sum(one.size - sizes.get(id(one), 0) for one in automata) / len(text))
    assert max(appended) <= 2


# Drafts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_corpus", [False, True], ids=["remembered", "remembered and corpus"])
def test_drafts_are_those_of_a_corpus_of_the_same_texts(target: Target, with_corpus: bool) -> None:
    """For a row that started before the texts were there, and for one that starts after them."""
    chance = random.Random(0)
    drafted = 0
    for _ in range(25):
        alphabet, most, room = chance.randint(1, 5), chance.randint(1, 5), chance.randint(4, 60)
        settings: dict[str, Any] = {
            "max_match": most,
            "min_match": chance.randint(1, most),
            "deepest": 4,
        }
        texts = (
            [
                [chance.randrange(alphabet + 1) for _ in range(chance.randint(1, 15))]
                for _ in range(3)
            ]
            if with_corpus
            else []
        )
        first = [token for text in texts for token in (*text, -1)]
        drafter = make(
            Suffix,
            target,
            remember=room,
            **settings,
            **({"corpus": "x", "corpus_ids": first} if with_corpus else {}),
        )
        early, row, held = drafter.memory(), list[int](), list[list[int]]()
        for _ in range(12):
            text = some_text(chance, alphabet, 15, held)
            drafter.remember_texts([text])
            held = kept(held, text, room)
            ids = [*first, *(token for text in held for token in (*text, -1))]
            corpus = make(Suffix, target, corpus="x", corpus_ids=ids, **settings).memory()
            later = drafter.memory()
            for token in row:
                corpus.append(token)
                later.append(token)
            for _ in range(3):
                row.append(chance.randrange(alphabet))
                for one in (early, corpus, later):
                    one.append(row[-1])
                for tree in TREES:
                    wanted = copied(corpus, corpus.root(), tree)
                    assert (
                        copied(early, early.root(), tree)
                        == wanted
                        == copied(later, later.root(), tree)
                    ), (held, row, settings)
                    drafted += len(wanted.tokens)
    assert drafted > 1000


@pytest.mark.parametrize(("remember", "held"), [(100, True), (0, False)])
def test_memory_is_held_while_it_is_read(
    target: Target, monkeypatch: pytest.MonkeyPatch, remember: int, held: bool
) -> None:
    """Where there is one: drafters without it never wait for each other."""
    found: list[bool] = []

    def looked(*given: Any) -> Any:
        found.append(LOCK.locked())
        return copied(*given)

    monkeypatch.setattr("drafttrain.drafter.retrieval.copied", looked)
    decode(
        target,
        make(Suffix, target, remember=remember),
        [[3, 4, 3, 4, 3]],
        Plan(Tree.chain(2)),
        max_new_tokens=6,
    )
    assert found and set(found) == {held} and not LOCK.locked()


def test_rows_of_many_calls_at_once(target: Target) -> None:
    """Texts are added by one thread while others draft: nothing is read while it changes."""
    drafter, failed = make(Suffix, target, remember=150), list[BaseException]()
    chance = random.Random(0)
    texts = [[chance.randrange(6) for _ in range(20)] for _ in range(60)]
    before = sys.getswitchinterval()

    def work(job: Any) -> None:
        try:
            for text in texts:
                job(text)
        except BaseException as error:
            failed.append(error)

    jobs = [
        lambda text: drafter.remember_texts([text]),
        *[lambda text: propose(drafter, [text, text[:9]], Tree.expansion([3, 2, 1]))] * 2,
    ]
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed and drafter.earlier is not None and list(drafter.earlier.texts) == texts[-7:]
    apart = copy.deepcopy(drafter.earlier)
    apart.add([1, 2])
    assert list(drafter.earlier.texts) == texts[-7:]


# Decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [Tree.chain(6), Tree.expansion([3, 2, 1]), Dynamic(depth=4, top_k=3, total=9)],
    ids=TREE_NAMES,
)
def test_greedy_text_is_the_targets_own_whatever_is_remembered(own: Any, tree: Growth) -> None:
    target, prompts, plain = own
    drafter, plan = make(Suffix, target, remember=2000), Plan(tree)
    kept = []
    for stop, limit in (
        ((), LIMIT),
        ((), LIMIT),
        ((plain[0][4], plain[1][9]), LIMIT),
        ((), 5),
        ((), 1),
        ((), 0),
    ):
        outputs, tally = decode(target, drafter, prompts, plan, max_new_tokens=limit, stop_ids=stop)
        for ids, output in zip(plain, outputs, strict=True):
            end = next((i + 1 for i, token in enumerate(ids) if token in stop), len(ids))
            assert output.ids == ids[: min(end, limit)]
        kept.append(tally.accepted)
    assert kept[1] > kept[0] + 3 * len(prompts), "what was decoded before is not drafted from"
    # Texts that start as these rows do, and go on otherwise.
    wrong = make(Suffix, target, remember=2000)
    wrong.remember_texts(
        [[*prompt, *ids[:6], *reversed(ids)] for prompt, ids in zip(prompts, plain, strict=True)]
    )
    outputs, tally = decode(target, wrong, prompts, plan, max_new_tokens=LIMIT, stop_ids=())
    assert [output.ids for output in outputs] == plain and tally.drafted > tally.accepted > 0


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(0.8), Policy(0.8, repetition_penalty=1.2)],
    ids=["greedy", "sampled", "penal"],
)
def test_rows_of_one_call_are_on_their_own(own: Any, policy: Policy) -> None:
    """All start with what earlier calls left, whatever rows are next to them and whenever these
    end."""
    target, prompts, plain = own
    plan, stop = Plan(Tree.expansion([2, 1, 1]), policy), (plain[0][7], plain[2][3])

    def filled() -> Suffix:
        drafter = make(Suffix, target, remember=2000)
        drafter.remember_texts(
            [[*prompt, *ids[:20]] for prompt, ids in zip(prompts, plain, strict=True)]
        )
        return drafter

    drafter = filled()
    together, tally = decode(
        target, drafter, prompts, plan, max_new_tokens=LIMIT, stop_ids=stop, seed=4
    )
    assert tally.accepted > 2 and len({len(output.runs) for output in together}) > 1
    for row, prompt in enumerate(prompts):
        (single,), _ = decode(
            target,
            filled(),
            [prompt],
            plan,
            max_new_tokens=LIMIT,
            stop_ids=stop,
            seed=4,
            row_numbers=[row],
        )
        assert (single.ids, single.runs, single.nodes) == (
            together[row].ids,
            together[row].runs,
            together[row].nodes,
        )
        assert single.tally == together[row].tally
    assert drafter.earlier is not None
    assert list(drafter.earlier.texts)[-len(prompts) :] == [
        [*p, *o.ids] for p, o in zip(prompts, together, strict=True)
    ]


@pytest.mark.parametrize("tree", [Tree.chain(2), Tree.expansion([2, 2])], ids=["chain", "tree"])
def test_sampled_text_keeps_the_targets_distribution(tree: Tree) -> None:
    target, prompt = load.tiny(**SMALL), (3, 5, 2)
    drafter, plan = make(Suffix, target, remember=300), Plan(tree, Policy(1.0))
    decode(target, drafter, [prompt] * 40, plan, max_new_tokens=6, stop_ids=(), seed=9)
    _, tally = decode(target, drafter, [prompt] * 40, plan, max_new_tokens=6, stop_ids=(), seed=10)
    assert tally.drafted > tally.rounds and 0 < tally.accepted < tally.drafted
    assert plan.made_by(drafter).rule_name == "one_hot"
    assert p_value(target, drafter, plan, rows=8_000, prompt=prompt) > 1e-3


def test_a_speculator_remembers_from_call_to_call(own: Any) -> None:
    target, prompts, plain = own
    speculator = Speculator(target, make(Suffix, target, remember=2000), Plan(Tree.chain(4)))
    drafter = speculator.drafter
    assert isinstance(drafter, Suffix) and drafter.earlier is not None
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": ()}
    _, first = speculator.generate(prompts[:1], **settings)
    speculator.generate(
        prompts[1:2], plan=PLAIN, **settings
    )  # Nothing was drafted: it is not this drafter's.
    for _ in speculator.stream(prompts[2], max_new_tokens=300, stop_ids=()):
        break  # What nobody read to its end was not decoded to its end.
    assert list(drafter.earlier.texts) == [[*prompts[0], *plain[0]]]
    streamed = [token for ids, _ in speculator.stream(prompts[0], **settings) for token in ids]
    assert streamed == plain[0]
    _, again = speculator.generate(prompts[:1], **settings)
    assert again.rounds < first.rounds
    turn = [*prompts[0], *plain[0], 50, 51]
    (output,), _ = speculator.generate([turn], **settings)
    assert list(drafter.earlier.texts) == [[*turn, *output.ids]]
    off = make(Suffix, target)
    decode(target, off, prompts, Plan(Tree.chain(4)), **settings)
    assert off.earlier is None and off.without_memory() is off and off.remembers == 0


# Measuring ----------------------------------------------------------------------------------------


def test_a_measurement_sees_only_what_it_has_decoded_itself(own: Any) -> None:
    target, prompts, _ = own
    drafter, plan, other = (
        make(Suffix, target, remember=2000),
        Plan(Tree.chain(4)),
        Plan(Tree.expansion([2, 1])),
    )
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": ()}
    assert drafter.earlier is not None
    first = measure_acceptance(target, drafter, prompts, plan, batch=1, **settings)
    assert not drafter.earlier.texts
    decode(target, drafter, prompts, plan, **settings)
    held = list(drafter.earlier.texts)
    again = measure_acceptance(target, drafter, prompts, plan, batch=1, **settings)
    forgetful = measure_acceptance(target, make(Suffix, target), prompts, plan, batch=1, **settings)
    assert again.tallies == first.tallies and first.tallies[0] == forgetful.tallies[0]
    # Every way of decoding has its own memory, and what warmed it up is not in it.
    raced = race(
        [Entrant(target, drafter, one) for one in (plan, other, plan)],
        prompts,
        warmup=2,
        **settings,
    )
    assert raced[0].tallies == raced[2].tallies == first.tallies
    assert (
        raced[1].tallies
        == measure_acceptance(target, drafter, prompts, other, batch=1, **settings).tallies
    )
    assert list(drafter.earlier.texts) == held
    assert (first.row()["remember"], first.row()["repeated_prompts"]) == (2000, 0)
    assert (forgetful.row()["remember"], forgetful.row()["repeated_prompts"]) == (0, 0)
    # A prompt that comes again is helped by its own answer, and the row says so.
    twice = measure_acceptance(
        target, drafter, [*prompts, *prompts], plan, batch=len(prompts), **settings
    )
    before, after = twice.tallies[: len(prompts)], twice.tallies[len(prompts) :]
    assert before == forgetful.tallies and sum(one.rounds for one in after) < sum(
        one.rounds for one in before
    )
    assert twice.row()["repeated_prompts"] == len(prompts)


def test_members_of_an_ensemble_remember(own: Any) -> None:
    target, prompts, plain = own
    remembering = make(Suffix, target, remember=2000)
    both = Ensemble(target, members=[make(NGram, target), remembering])
    plan = Plan(both.shaped(Tree.chain(3)))
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": ()}
    measured = measure_acceptance(target, both, prompts, plan, batch=2, **settings)
    assert (
        remembering.earlier is not None
        and not remembering.earlier.texts
        and measured.remember == 2000
    )
    rounds = followed(target, both, prompts, Tree.chain(3), max_new_tokens=LIMIT, batch=2)
    assert rounds and not remembering.earlier.texts
    one, first = decode(target, both, prompts, plan, **settings)
    two, second = decode(target, both, prompts, plan, **settings)
    assert [o.ids for o in one] == [o.ids for o in two] == plain and second.rounds < first.rounds
    assert len(remembering.earlier.texts) == 2 * len(prompts)
    copies = Ensemble(target, members=[make(NGram, target)])
    assert copies.without_memory() is copies and tokens_remembered(copies) == 0
    assert without_memory(copies.drafters[0]) is copies.drafters[0]
    assert tokens_remembered(both) == 2000 and tokens_remembered(copies.drafters[0]) == 0
    remember_texts(copies.drafters[0], prompts)
