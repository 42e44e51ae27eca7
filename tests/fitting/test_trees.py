"""Default trees that are deeper than the drafter fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafttrain import fit
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.fitting.settings import build_settings
from drafttrain.fitting.trees import cut_defaults
from drafttrain.target.model import Target
from drafttrain.training.job import Settings
from drafttrain.tree.topology import Tree
from drafttrain.wiring.composing import compose
from drafttrain.wiring.config import Config
from tests.drafter.make import make
from tests.fitting.parts import UNMEASURED, refusal, words

# F95. The cause: default trees are made for any drafter, and checked against one. So it is any
# drafter that has a depth of its own (heads of both kinds, suffix, an ensemble of such), and any
# tree that nobody named: the recipe's own, those of acceptance and of speed, grown ones too.


def composed(*more: str) -> tuple[Settings, list[str]]:
    overrides = ["experiment=smoke", "data.path=x", *more]
    return build_settings(Config.of(compose("fit", overrides))), overrides


def shallow(target: Target) -> list[Drafter]:
    two: dict[str, Any] = {"heads": 2}
    return [
        make(Medusa, target, **two),
        make(HydraHeads, target, **two),
        make(Suffix, target, deepest=2),
        Ensemble(target, members=[make(Medusa, target, **two), make(Suffix, target, deepest=1)]),
    ]


@pytest.mark.field("F95")
def test_default_trees_are_cut_to_what_the_drafter_fills(target: Target) -> None:
    given, overrides = composed()
    for drafter in shallow(target):
        settings, said = cut_defaults(given, drafter.max_depth, overrides)
        drafter.check(settings.tree)
        settings.final.check(drafter)
        assert settings.tree == Tree.chain(2), "the recipe's own is nobody's wish either"
        names = ["chain_1", "chain_2", "tree_2x2x1_to_2", "tree_3x1x1_to_2"]
        assert list(settings.final.speed) == names, "cut ones have other names, each is there once"
        assert settings.final.acceptance["chain_4_to_2"] == Tree.chain(2)
        assert (
            "cut to a depth of 2, all" in said and "final.acceptance.static_25 (static 25)" in said
        ), said
        assert "tree (chain 4)" in said and "chain_2" not in said, said
    assert cut_defaults(given, make(NGram, target).max_depth, overrides) == (given, "")
    assert cut_defaults(given, 6, overrides)[1] == ""


@pytest.mark.field("F95")
@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("tree.k=4", "the tree"),
        ("final.speed.chain_3.k=5", "final.speed.chain_3"),
        ("final.acceptance.chain_10=${final.speed.chain_5}", "final.acceptance.chain_10"),
        ("final.speed={chain_5:{k:5}}", "final.speed.chain_5"),
        ("final={prompts:2,speed:{chain_4:{k:4}}}", "final.speed.chain_4"),
        ("+final.speed={mine:${final.speed.chain_5}}", "final.speed.mine"),
        ("tree={k:4}", "the tree"),
    ],
)
def test_a_tree_that_the_command_names_stays_and_is_refused(
    target: Target, word: str, named: str
) -> None:
    given, overrides = composed(word)
    drafter = make(Medusa, target, heads=2)
    settings, _ = cut_defaults(given, drafter.max_depth, overrides)
    with pytest.raises(InputError, match=rf"{named}.* deep, this drafter fills"):
        drafter.check(settings.tree)
        settings.final.check(drafter)


# Neighbours: a word names what it gives a value to, and nothing next to it.


@pytest.mark.field("F95")
@pytest.mark.parametrize(
    "word",
    [
        *("final={prompts: 2}", "final.prompts=2", "final={}", "final.speed={}", "tree={}"),
        *("final={speed:{},prompts:2}", "final={speed:{},acceptance:{}}", "final.samples=0"),
    ],
)
def test_a_word_that_names_no_tree_leaves_the_default_ones(target: Target, word: str) -> None:
    given, overrides = composed(word)
    drafter = make(Medusa, target, heads=2)
    settings, said = cut_defaults(given, drafter.max_depth, overrides)
    drafter.check(settings.tree)
    settings.final.check(drafter)
    assert settings.tree == Tree.chain(2) and "chain_4_to_2" in settings.final.acceptance
    assert "tree (chain 4)" in said and "final.speed.chain_5" in said


@pytest.mark.field("F95")
def test_a_run_says_which_trees_it_cut(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ["drafter=medusa", "drafter.heads=1", "trainer.max_steps=1", *UNMEASURED]
    fit.main(words(folder, tmp_path / "run", *heads))
    assert "default trees are cut to a depth of 1" in " ".join(capsys.readouterr().out.split())
    assert "4 deep, this drafter fills 1" in refusal(
        capsys, words(folder, tmp_path / "other", *heads, "tree.k=4")
    )
