"""Packages of drafters that copy text: no weights inside, the text to copy from if there is one,
all of it checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.retrieval import Retrieval
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.hf_generate import generate
from drafttrain.packaging.manifest import CARD, CONFIG, DECODING, FILES, TENSORS, read_config
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import packed

PROMPT = [5, 6, 7, 8, 9, 10, 5, 6]
CORPUS = [*range(20, 60), -1, *range(90, 100), -1]
PLAN = Plan(Tree.expansion([2, 1]))


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


def made(target: Target) -> dict[str, tuple[Retrieval, Growth]]:
    return {
        "ngram": (
            drafters.make(NGram, target, max_ngram=4, prefer="recent"),
            Tree.expansion([2, 1]),
        ),
        "suffix": (drafters.make(Suffix, target, max_match=5), Dynamic(depth=3, top_k=2, total=5)),
        "suffix with a corpus": (
            drafters.make(Suffix, target, corpus="builtin:talk", corpus_ids=CORPUS),
            Tree.chain(5),
        ),
    }


@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix with a corpus"])
def test_round_trip(name: str, target: Target, tmp_path: Path) -> None:
    drafter, tree = made(target)[name]
    folder = packed(tmp_path / "package", drafter, target, plan=Plan(tree), trained_length=None)
    assert sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    ) == sorted(FILES)
    tensors = load_file(folder / TENSORS)
    assert [*tensors] == (["corpus_ids"] if "corpus" in name else [])
    config = read_config(folder)
    assert config["needs"] == {"last_hidden": False, "layers": [], "logits": False}
    assert (config["shape"]["parameters"], config["trained_length"]) == (0, None)
    again = load_drafter(folder, target)
    assert type(again) is type(drafter) and again.settings() == drafter.settings()
    speculator = drafttrain.load(folder, target)
    assert speculator.plan == Plan(tree, sampled=False)
    for policy in (Policy(), Policy(1.0)):
        plan = Plan(tree, policy)
        ours, _ = speculator.generate([PROMPT, [3]], max_new_tokens=20, plan=plan, seed=2)
        theirs, _ = drafttrain.load(folder, target, dtype="bfloat16").generate(
            [PROMPT, [3]], max_new_tokens=20, plan=plan, seed=2
        )
        assert [o.runs for o in ours] == [o.runs for o in theirs]
        if policy.greedy:
            plain, _ = speculator.generate(
                [PROMPT, [3]], max_new_tokens=20, plan=Plan(Tree.chain(0))
            )
            assert [o.ids for o in ours] == [o.ids for o in plain]


def test_the_card_says_what_it_is(target: Target, tmp_path: Path) -> None:
    cards = {}
    for name, (drafter, _) in made(target).items():
        cards[name] = (packed(tmp_path / name, drafter, target, licence="MIT") / CARD).read_text()
    assert all(
        "nothing was trained" in card and "trained parameters" not in card
        for card in cards.values()
    )
    assert (
        "license" not in cards["suffix"]
        and "Nothing in this package was learned" in cards["suffix"]
    )
    card = cards["suffix with a corpus"]
    assert "conversations of builtin:talk in this package" in card and "under MIT" in card


def test_what_is_remembered_is_a_setting_and_never_in_a_package(
    target: Target, tmp_path: Path
) -> None:
    drafter = drafters.make(Suffix, target, remember=500)
    drafter.remember_texts([PROMPT])
    folder = packed(tmp_path / "package", drafter, target, plan=PLAN)
    again = load_drafter(folder, target)
    assert (
        isinstance(again, Suffix)
        and again.settings() == drafter.settings()
        and not load_file(folder / TENSORS)
    )
    assert again.earlier is not None and not again.earlier.texts
    card = (folder / CARD).read_text()
    assert (
        "the latest 500 tokens of prompts and answers" in card and "need separate processes" in card
    )
    assert (
        "what was decoded in it before"
        not in (
            packed(tmp_path / "off", drafters.make(Suffix, target), target, plan=PLAN) / CARD
        ).read_text()
    )


def edit_config(package: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor too many": (
        lambda p: save_file({**load_file(p / TENSORS), "fc": torch.zeros(2)}, p / TENSORS),
        said("packaging.unexpected") + " fc",
    ),
    "no corpus": (
        lambda p: save_file({}, p / TENSORS),
        said("packaging.lacks") + r" corpus_ids.*builtin:talk",
    ),
    "a corpus of floats": (
        lambda p: save_file({"corpus_ids": torch.ones(4)}, p / TENSORS),
        said("packaging.lacks") + " corpus_ids",
    ),
    "a corpus of ids beyond": (
        lambda p: save_file({"corpus_ids": torch.tensor([3, 999])}, p / TENSORS),
        "from 3 to 999",
    ),
    "a corpus that nobody names": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(corpus=None)),
        said("packaging.unexpected") + " corpus_ids",
    ),
    "a corpus of another kind": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(corpus=3)),
        "corpus",
    ),
    "a setting out of range": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(max_match=0)),
        "max_match=0",
    ),
    "a setting of another kind": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(max_match="x")),
        "max_match is 'x'",
    ),
    "a setting missing": (
        lambda p: edit_config(p, lambda c: c["drafter"].pop("deepest")),
        said("packaging.lacks") + " deepest",
    ),
    "a memory of words": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(remember="x")),
        "remember is 'x'",
    ),
    "a memory beyond bounds": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(remember=-3)),
        "remember=-3",
    ),
    "other needs": (
        lambda p: edit_config(p, lambda c: c["needs"].update(last_hidden=True)),
        said("packaging.needs_differ"),
    ),
    "drawn drafts": (
        lambda p: (p / DECODING).write_text(
            (p / DECODING)
            .read_text()
            .replace("sampled: false", "sampled: true")
            .replace("temperature: 0.0", "temperature: 1.0")
        ),
        said("packaging.no_drafts_drawn"),
    ),
    "no tensors file": (
        lambda p: (p / TENSORS).unlink(),
        said("packaging.lacks") + r" drafter\.safetensors",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(name: str, target: Target, tmp_path: Path) -> None:
    drafter, _ = made(target)["suffix with a corpus"]
    package = packed(tmp_path / "package", drafter, target, plan=PLAN)
    edit, message = DAMAGE[name]
    edit(package)
    with pytest.raises(InputError, match=message):
        drafttrain.load(package, target)


def test_what_a_package_names_is_never_read(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttrain.drafter import suffix

    def never(*_given: Any) -> Any:
        raise AssertionError("a set was read")

    monkeypatch.setattr(suffix, "read_set", never)
    drafter, _ = made(target)["suffix with a corpus"]
    package = packed(tmp_path / "package", drafter, target, plan=PLAN)
    assert load_drafter(package, target).settings()["corpus_ids"] == CORPUS
    save_file({}, package / TENSORS)
    with pytest.raises(InputError, match=said("packaging.lacks") + " corpus_ids"):
        load_drafter(package, target)


def test_transformers_decodes_with_it(target: Target, tmp_path: Path) -> None:
    package = packed(tmp_path / "package", drafters.make(NGram, target), target, plan=PLAN)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.model.generate(ids, **settings)
    for _ in range(2):
        assert torch.equal(generate(target.model, package=package, inputs=ids, **settings), plain)
