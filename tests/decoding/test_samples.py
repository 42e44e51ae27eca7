"""Samples are what was decoded: pass by pass, with nothing added and nothing lost."""

from __future__ import annotations

import json

from drafttrain.decoding.loop import Output
from drafttrain.decoding.measure import Measurement, measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.samples import samples_of
from drafttrain.drafter.ngram import NGram
from drafttrain.flow import Tally
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters


def test_every_pass_has_its_part_of_the_text(target: Target) -> None:
    """A character of several tokens belongs to the token that completes it, and the end of a turn
    is no text."""
    assert target.tokenizer is not None
    prompt, text = target.tokenizer.encode("the <b>"), target.tokenizer.encode("the é<i>")
    assert len(text) == 7, "the, blank, two bytes, three letters"
    output = Output(ids=[*text, 2], runs=[(1, 0), (2, 1), (3, 2), (2, 2)], finish="stop")
    found = Measurement(
        Plan(Tree.chain(2), Policy(0.5)),
        [],
        Tally(),
        [8],
        guarantee="distribution",
        outputs=[output, output],
    )
    kept = samples_of(target, [prompt, prompt, prompt], found, 5)
    assert kept is not None and kept == json.loads(json.dumps(kept))
    assert {name: kept[name] for name in kept if name != "answers"} == {
        "tree": "chain 2",
        "temperature": 0.5,
        "rule": found.plan.rule_name,
        "guarantee": "distribution",
        "written_in": "text",
    }
    assert kept["answers"] == 2 * [
        {
            "prompt": "the <b>",
            "finish": "stop",
            "passes": [
                {"tokens": 1, "drafts": [], "own": "the"},
                {"tokens": 2, "drafts": [" "], "own": ""},
                {"tokens": 3, "drafts": ["é", "<"], "own": "i"},
                {"tokens": 2, "drafts": [">", ""], "own": ""},
            ],
        }
    ]
    one = samples_of(target, [prompt, prompt], found, 1)
    assert one is not None and len(one["answers"]) == 1
    assert samples_of(target, [prompt, prompt], found, 0) is None
    assert (
        samples_of(
            target,
            [],
            measure_acceptance(target, None, [], Plan(Tree.chain(0)), max_new_tokens=4),
            3,
        )
        is None
    )


def test_half_a_character_at_the_end_is_shown_as_such(target: Target) -> None:
    assert target.tokenizer is not None
    ids = target.tokenizer.encode("aé")
    output = Output(ids=ids[:2], runs=[(1, 0), (1, 0)])
    kept = samples_of(
        target, [[5]], Measurement(Plan(Tree.chain(1)), [], Tally(), [2], outputs=[output]), 1
    )
    assert kept is not None and [one["own"] for one in kept["answers"][0]["passes"]] == [
        "a",
        "\ufffd",
    ]


def test_without_a_tokenizer_ids_stand_for_text() -> None:
    target = load.tiny()
    prompts = [[5, 6, 5, 6, 5, 6]]
    found = measure_acceptance(
        target, drafters.make(NGram, target), prompts, Plan(Tree.chain(2)), max_new_tokens=12
    )
    kept = samples_of(target, prompts, found, 1)
    assert (
        kept is not None
        and kept["written_in"] == "ids"
        and kept["answers"][0]["prompt"] == "5 6 5 6 5 6"
    )
    passes = kept["answers"][0]["passes"]
    assert [(one["tokens"], len(one["drafts"])) for one in passes] == found.outputs[0].runs
    said = "".join("".join(one["drafts"]) + one["own"] for one in passes)
    assert [int(word) for word in said.split()] == found.outputs[0].ids
