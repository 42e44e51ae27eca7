"""What every drafter must hold: one suite over all of `conf/drafter/`.

A new family gets it by its file there. Sizes that do not fit a tiny target are given in `TINY`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.data.joining import join, taken_apart
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.heads import VocabularyHeads
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.remembered import without_memory
from drafttrain.drafter.vocabulary import most_frequent
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.building import named_by
from drafttrain.wiring.conf import conf_dir
from drafttrain.wiring.defaults import default_settings, with_defaults
from tests.decoding.models import PLAIN, SMALL, p_value
from tests.packaging.made import packed

FILES = {path.stem: OmegaConf.load(path) for path in (conf_dir() / "drafter").glob("*.yaml")}
NAMES = sorted(FILES)
KINDS: dict[str, Any] = {
    name: kind
    for name in NAMES
    if isinstance(kind := named_by(FILES[name]), type) and issubclass(kind, Drafter)
}
TINY: dict[str, dict[str, Any]] = {
    "early_exit": {"exit_layer": 0},
    "hydra_heads": {"heads": 3},
    "medusa": {"heads": 3},
    "selfspec": {"skip_attention": [1], "skip_mlp": []},
    "ssm": {"layers": [0]},
}
PROMPTS = [[3, 5, 7, 3, 5], [11, 12], [20, 21, 22, 23, 20, 21, 22]]
TREES: dict[str, Growth] = {
    "chain": Tree.chain(3),
    "tree": Tree.expansion([3, 2, 1]),
    "dynamic": Dynamic(depth=3, top_k=3, total=8),
    "confident": Confident(k=3, stop_below=0.02),
}


def made(name: str, *, stir: bool = True, **target: Any) -> Drafter:
    """A drafter with weights that are not where training starts, so that its heads, cuts and
    adapters differ from the target."""
    return build(name, load.tiny(**{"family": "qwen3", "layers": 3, **target}), stir)


def build(name: str, target: Target, stir: bool = True) -> Drafter:
    torch.manual_seed(0)
    if name == "ensemble":
        members = [build("medusa", target, stir), with_defaults(NGram, target)]
        return Ensemble(target, members=members).eval()
    drafter = with_defaults(KINDS[name], target, **TINY.get(name, {}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters() if stir else ():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return drafter.eval()


def fills(drafter: Drafter, tree: Growth) -> bool:
    """By what it says of itself; that `check` agrees is a test below."""
    parts = drafter.drafters if isinstance(drafter, Ensemble) else [drafter]
    kinds = all(isinstance(tree, one.growths) for one in parts)
    return kinds and (drafter.max_depth is None or drafter.max_depth >= tree.max_depth)


def can_fill(name: str, tree: str) -> bool:
    return fills(made(name), TREES[tree])


def rows_of(count: int) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number, n in enumerate([9, 2, 13, 3, 6][:count]):
        ids = torch.randint(3, 250, (n,), generator=generator)
        mask = torch.arange(n) >= n // 2
        rows.append((ids, mask, number))
    return rows


def features_of(drafter: Drafter, batch: Batch) -> Features:
    found = drafter.target.features(batch.input_ids, batch.lengths, drafter.needs, batch.packing)
    hidden = None if found.last_hidden is None else found.last_hidden.clone()
    return Features(hidden, {layer: value.clone() for layer, value in found.layers.items()})


# Settings -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_settings_are_of_the_config_only_and_plain(name: str) -> None:
    drafter = made(name)
    config = drafter.config
    assert dataclasses.is_dataclass(config) and type(config).__dataclass_params__.frozen
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    for field in dataclasses.fields(config):
        assert (field.default, field.default_factory) == missing, f"{field.name} has two defaults"
    in_conf = set(FILES[name]) - {"_target_"}
    run_time = set(default_settings(KINDS[name])) - in_conf
    assert run_time <= {"draft_ids", "corpus_ids"}, "what conf/ does not name is made by a run"
    settings = drafter.settings()
    assert json.loads(json.dumps(settings)) == settings
    again = type(drafter)(drafter.target, **settings)
    assert again.settings() == settings


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_same_drafter(name: str) -> None:
    drafter = made(name)
    copy = drafter.at(torch.float32)
    assert type(copy) is type(drafter) and copy.settings() == drafter.settings()
    mine, theirs = drafter.state_dict(), copy.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert not any(p.requires_grad for p in copy.parameters()) and not copy.training


# Decoding -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "tree"), [(n, t) for n in NAMES for t in TREES if can_fill(n, t)])
def test_greedy_text_is_the_targets_own_in_every_batch(name: str, tree: str) -> None:
    drafter, plan = made(name), Plan(TREES[tree])
    target = drafter.target
    plain, _ = decode(target, None, PROMPTS, PLAIN, max_new_tokens=14, stop_ids=())
    stop = (plain[1].ids[7],)  # rows end at different rounds, and the others go on
    apart = []
    for row, prompt in enumerate(PROMPTS):
        own = without_memory(drafter)
        (one,), _ = decode(target, own, [prompt], plan, max_new_tokens=14, stop_ids=stop)
        end = [i + 1 for i, token in enumerate(plain[row].ids) if token in stop]
        assert one.ids == plain[row].ids[: end[0] if end else 14]
        apart.append(one)
    own = without_memory(drafter)
    together, _ = decode(target, own, PROMPTS, plan, max_new_tokens=14, stop_ids=stop)
    for one, other in zip(apart, together, strict=True):
        assert (one.ids, one.runs, one.tally) == (other.ids, other.runs, other.tally)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_text_has_the_targets_distribution(name: str) -> None:
    drafter = made(name, **SMALL)
    trees = [Tree.chain(2), Tree.expansion([2, 2])]
    for tree in (tree for tree in trees if fills(drafter, tree)):
        plan = Plan(tree, Policy(1.0), sampled=None if drafter.can_draw else False)
        assert p_value(drafter.target, drafter, plan, rows=3000) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_what_a_round_drafts_follows_from_the_text_only(name: str) -> None:
    """A state that has been through refused drafts proposes what a new one does: nothing but what
    is committed stays in it."""
    drafter = without_memory(made(name))
    target, tree = drafter.target, drafter.shaped(TREES["tree"])
    text = torch.randint(3, 250, (1, 14), generator=torch.Generator().manual_seed(3))

    def committed(start: int, end: int) -> Committed:
        """Features of positions start..end-1; end is the anchor's place."""
        batch = torch.tensor([end])
        found = target.features(text[:, :end], batch, drafter.needs)
        hidden = None if found.last_hidden is None else found.last_hidden[:, start:]
        layers = {layer: value[:, start:] for layer, value in found.layers.items()}
        first = text[:, 0] if start == 0 else None
        tokens, count = text[:, start + 1 : end + 1], torch.tensor([end - start])
        return Committed(Features(hidden, layers), tokens, count, first=first)

    def state(end: int) -> tuple[Any, Any]:
        opened = drafter.open(1, 64)
        cache = target.new_cache(1, 64)
        if isinstance(drafter, Inside):
            target.step(text[:, :end], cache)
            cache.commit(torch.tensor([end]))
            drafter.attach(opened, cache)
        return opened, cache

    with torch.inference_mode():
        kept, cache = state(5)
        ends = [5, 6, 9, 12]
        for start, end in zip([0, *ends], ends, strict=False):
            if isinstance(drafter, Inside) and start:
                target.step(text[:, start:end], cache)
                cache.commit(torch.tensor([end - start]))
            found = drafter.propose(kept, committed(start, end), tree, Policy(), None)
            new = drafter.propose(state(end)[0], committed(0, end), tree, Policy(), None)
            assert torch.equal(found.tokens, new.tokens) and torch.equal(found.parents, new.parents)


@pytest.mark.parametrize("name", NAMES)
def test_trees_that_it_cannot_fill_are_refused(name: str) -> None:
    drafter = made(name)
    deepest = drafter.max_depth
    for tree in TREES.values():
        if fills(drafter, tree):
            drafter.check(drafter.shaped(tree))
        else:
            with pytest.raises(InputError):
                drafter.check(drafter.shaped(tree))
    if deepest is not None and not isinstance(drafter, Ensemble):
        with pytest.raises(InputError, match=str(deepest)):
            drafter.check(Tree.chain(deepest + 1))


# Learning -----------------------------------------------------------------------------------------
def learners() -> list[str]:
    return [name for name in KINDS if KINDS[name].learns]


@pytest.mark.parametrize("name", learners())
def test_its_loss_reports_its_parts_and_reaches_its_weights(name: str) -> None:
    drafter = made(name).train()
    batch = collate(rows_of(5))
    loss = drafter.loss(batch, features_of(drafter, batch))
    assert set(loss.parts) == set(drafter.loss_parts) and float(loss.count) > 0
    loss.total.backward()
    lost = [n for n, p in drafter.named_parameters() if p.requires_grad and p.grad is None]
    assert not lost
    empty = collate([(torch.tensor([4]), torch.tensor([True]), 0)])
    none = drafter.loss(empty, features_of(drafter, empty))
    assert float(none.total.detach()) == 0.0 == float(none.count)
    assert all(torch.isfinite(value).all() for pair in none.parts.values() for value in pair)


@pytest.mark.parametrize("name", learners())
def test_joined_rows_are_learned_and_guessed_as_by_themselves(name: str) -> None:
    drafter = made(name, family="llama")
    try:
        drafter.check_packing()
    except InputError as error:
        assert "trainer.pack" in str(error)
        return
    drafter.target.choose_isolation()
    rows = rows_of(5)
    packed_rows, padded = join(rows, 16), collate(rows)
    joined = drafter.loss(packed_rows, features_of(drafter, packed_rows))
    apart = drafter.loss(padded, features_of(drafter, padded))
    torch.testing.assert_close(joined.total, apart.total, rtol=1e-4, atol=1e-4)
    assert float(joined.count) == float(apart.count)
    found = drafter.guesses(packed_rows, features_of(drafter, packed_rows))
    if found is None:
        return
    for guessed, row in zip(taken_apart(found, packed_rows), rows, strict=True):
        batch = collate([row])
        alone = drafter.guesses(batch, features_of(drafter, batch))
        assert alone is not None and torch.equal(guessed, alone[0])


@pytest.mark.parametrize("name", learners())
def test_a_reduced_vocabulary_is_all_it_proposes_from(name: str) -> None:
    target = load.tiny(layers=3)
    counts = torch.bincount(torch.arange(3, 40), minlength=target.vocab_size)
    kept = most_frequent(counts, 24, target.stop_ids)
    drafter = with_defaults(KINDS[name], target, **TINY.get(name, {}), draft_ids=kept).eval()
    assert drafter.choices == 24
    tree = Tree.expansion([4, 3, 2])
    _, tally = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=6, stop_ids=())
    assert tally.drafted > 0
    with pytest.raises(InputError):
        drafter.check(Tree.expansion([25]))


# Packages -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_package_is_the_same_drafter(name: str, tmp_path: Path) -> None:
    drafter = made(name)
    plan = Plan(drafter.shaped(Tree.chain(3)))
    package = packed(tmp_path / "package", drafter, drafter.target, plan=plan)
    again = load_drafter(package, drafter.target)
    assert type(again) is type(drafter) and again.settings() == drafter.settings()
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert isinstance(again, VocabularyHeads) == isinstance(drafter, VocabularyHeads)
    texts = []
    for one in (drafter, again):
        own = without_memory(one.at(torch.float32))
        outputs, _ = decode(drafter.target, own, PROMPTS, plan, max_new_tokens=8, stop_ids=())
        texts.append([(output.ids, output.runs) for output in outputs])
    assert texts[0] == texts[1]
