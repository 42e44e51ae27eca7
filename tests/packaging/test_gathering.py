"""Packages of several drafters: made of others, read back bit for bit, and refused where anything
in them is off."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain import fit
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.fitting import settings
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.decoding import read_plan, tree_of, write_plan
from drafttrain.packaging.gathering import check_packages
from drafttrain.packaging.gathering import ensemble as gathered
from drafttrain.packaging.manifest import CARD, CONFIG, DECODING, FILES, TENSORS, read_config
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest, forest
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import packed
from tests.training.parts import write_tiny_set

PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10]]
CORPUS = [*range(20, 60), -1]
FOREST = Forest((Tree.expansion([2, 1]), Tree.chain(2), Confident(k=3, stop_below=0.1)))


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Ensemble:
    torch.manual_seed(3)
    members = [
        drafters.make(Ssm, target, layers=[0, 2], draft_ids=list(range(1, 201, 2))),
        drafters.make(Suffix, target, corpus="builtin:talk", corpus_ids=CORPUS),
        drafters.make(Ssm, target, layers=1, width=32, heads=2),
    ]
    return Ensemble(target, members=members).eval()  # type: ignore[return-value]


@pytest.fixture
def package(drafter: Ensemble, target: Target, tmp_path: Path) -> Path:
    return packed(tmp_path / "package", drafter, target, plan=Plan(FOREST), licence="MIT")


def test_round_trip(package: Path, drafter: Ensemble, target: Target) -> None:
    assert sorted(
        str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()
    ) == sorted(FILES)
    config = read_config(package)
    nodes = config["drafter"]["members"]
    assert [node["_target_"].rpartition(".")[2] for node in nodes] == ["Ssm", "Suffix", "Ssm"]
    assert [node["draft_vocab"] for node in nodes] == [100, 320, 320] and "draft_ids" not in nodes[
        0
    ]
    assert (
        config["drafter"].keys() == {"_target_", "members"}
        and config["shape"]["draft_vocab"] == 320
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = load_drafter(package, target)
    assert torch.equal(torch.get_rng_state(), before), "loading moved the random state"
    assert (
        isinstance(again, Ensemble)
        and again.settings() == drafter.settings()
        and not again.training
    )
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )
    assert {"members.0.draft_ids", "members.1.corpus_ids"} <= load_file(package / TENSORS).keys()
    assert not [
        name
        for name in load_file(package / TENSORS)
        if name.startswith("members.0") and "embed" in name
    ]


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0)], ids=["greedy", "sampled"])
def test_it_decodes_like_the_live_ensemble(
    package: Path, drafter: Ensemble, target: Target, policy: Policy
) -> None:
    from drafttrain.decoding.speculator import Speculator

    plan = Plan(FOREST, policy)
    speculator = drafttrain.load(package, target, dtype="float32")
    assert speculator.plan == Plan(FOREST)
    ours, _ = speculator.generate(PROMPTS, max_new_tokens=12, plan=plan, seed=4)
    theirs, _ = Speculator(target, drafter, plan, dtype="float32").generate(
        PROMPTS, max_new_tokens=12, seed=4
    )
    assert [(o.ids, o.runs) for o in ours] == [(o.ids, o.runs) for o in theirs]
    if policy.greedy:
        plain, _ = speculator.generate(PROMPTS, max_new_tokens=12, plan=Plan(Tree.chain(0)))
        assert [o.ids for o in ours] == [o.ids for o in plain]


def test_the_card_says_what_it_is(package: Path) -> None:
    card = (package / CARD).read_text()
    for words in (
        "draft side by side: Ssm, Suffix, Ssm",
        "a tree of 4 drafts, 2 deep by member 1; a chain of 2 by member 2",
    ):
        assert words in card
    assert "under MIT" in card


@pytest.mark.parametrize(
    "tree", [FOREST, forest([0, 3]), Forest((Dynamic(depth=2, top_k=2, total=4), Tree.chain(1)))]
)
def test_plan_round_trip(tree: Growth, tmp_path: Path) -> None:
    (tmp_path / DECODING).write_text(write_plan(Plan(tree, Policy(1.0))))
    assert read_plan(tmp_path / DECODING) == Plan(tree, Policy(1.0))


def test_trees_by_name() -> None:
    assert tree_of("4+3") == forest([4, 3])
    assert tree_of("expand:2x1 + [[0],[1]] + dynamic:2x2x3") == Forest(
        (Tree.expansion([2, 1]), Tree.expansion([2]), Dynamic(depth=2, top_k=2, total=3))
    )
    wrong = {"4+": "tree ''", "4+x": "tree 'x'"}
    for value, message in [*wrong.items(), ({"growth": "forest", "trees": 4}, r"tree\.trees is")]:
        with pytest.raises(InputError, match=message):
            tree_of(value)
    with pytest.raises(InputError, match="1024"):
        tree_of("600+600")


# --- made of packages -----------------------------------------------------------------------------


def test_packages_become_members_and_an_ensembles_count_as_its_own(
    package: Path, drafter: Ensemble, target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    more = drafters.make(Eagle1, target)
    other = packed(tmp_path / "other", more, target)
    found = gathered(target, packages=[str(other), str(package)])
    assert [type(member).__name__ for member in found.drafters] == [
        "Eagle1",
        "Ssm",
        "Suffix",
        "Ssm",
    ]
    assert found.settings()["members"][1:] == drafter.settings()["members"]
    assert torch.equal(found.state_dict()["members.0.fc.weight"], more.state_dict()["fc.weight"])
    assert torch.equal(
        found.state_dict()["members.1.draft_ids"], drafter.state_dict()["members.0.draft_ids"]
    )


def test_packages_that_cannot_be_gathered(package: Path, target: Target, tmp_path: Path) -> None:
    for given in ([], str(package), [3], None):
        with pytest.raises(InputError, match=r"drafter\.packages="):
            check_packages(given)
    with pytest.raises(InputError, match="/nowhere " + said("packaging.not_exist")):
        check_packages([str(package), str(tmp_path / "nowhere")])
    other = packed(tmp_path / "other", drafters.make(NGram, load.tiny(seed=1)), load.tiny(seed=1))
    with pytest.raises(InputError, match=said("packaging.another_target")):
        gathered(target, packages=[str(package), str(other)])
    config = json.loads((other / CONFIG).read_text())
    config["adapter"] = {
        "rank": 1,
        "alpha": 1,
        "linears": ["q_proj"],
        "parameters": 1,
        "digest": "",
    }
    (other / CONFIG).write_text(json.dumps(config))
    (other / "adapter.safetensors").touch()
    with pytest.raises(InputError, match=said("packaging.joint")):
        check_packages([str(other)])


def test_the_door_measures_and_packages_an_ensemble(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_set(target, tmp_path / "set", rows=12, held_out=2, tokens=12)
    torch.manual_seed(0)
    one = packed(tmp_path / "one", drafters.make(Ssm, target, layers=[0]), target)
    two = packed(tmp_path / "two", drafters.make(NGram, target), target)
    words = [
        "experiment=smoke",
        f"data.path={folder}",
        "draft_vocab=0",
        "drafter=ensemble",
        "tree=forest",
        "tree.trees=[2,3]",
    ]
    words += [
        f"drafter.packages=[{one},{two}]",
        f"run_dir={tmp_path / 'run'}",
        "final.acceptance.static_25=null",
    ]
    words += [
        f"final.speed.{name}=null"
        for name in ("chain_2", "chain_3", "chain_4", "chain_5", "tree_2x2x1", "tree_3x1x1")
    ]
    fit.main(words)
    rows = json.loads((tmp_path / "run" / "package" / "metrics.json").read_text())["rows"]
    assert [(row["label"], row["tree"], row["nodes"]) for row in rows] == [
        ("chain_4", "chain 4 + chain 4", 8),
        ("chain_2_+_chain_3", "chain 2 + chain 3", 5),
        ("chain_1 alone", "chain 1 + chain 1", 2),
        ("chain_2_+_chain_3 alone", "chain 2 + chain 3", 5),
    ]
    assert all(row["same_as_plain"] == row["prompts"] for row in rows if row["measured"] == "speed")
    found = load_drafter(tmp_path / "run" / "package", target)
    assert [type(member).__name__ for member in found.drafters] == ["Ssm", "NGram"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fit.main([*words, f"run_dir={tmp_path / 'other'}", "tree.trees=[2,3,4]"])
    assert (
        re.search(r"has 3 trees.* 2 members", capsys.readouterr().err)
        and not (tmp_path / "other").exists()
    )


def test_settings_that_no_ensemble_has_are_refused_early() -> None:
    words = [
        "drafter=ensemble",
        "drafter.packages=[x]",
        "target=tiny",
        "data=set",
        "data.path=x",
        "tree=forest",
    ]
    config = compose("fit", words)
    for key, value, named in (
        ("resume", "last", "resume=last: Ensemble"),
        ("boost", {"members": 2}, "boost: Ensemble"),
        ("draft_vocab", 64, "draft_vocab"),
        ("drafter.packages", [], "drafter.packages="),
        ("drafter.packages", ["/nowhere"], "package=/nowhere"),
    ):
        other = copy.deepcopy(config)
        OmegaConf.update(other, key, value, force_add=True)
        with pytest.raises(InputError, match=re.escape(named)):
            settings.read_settings(other)


# --- damage ---------------------------------------------------------------------------------------


def tensors(package: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = load_file(package / TENSORS)
    edit(found)
    save_file(found, package / TENSORS)


def members(package: Path, edit: Callable[[list[Any]], Any]) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config["drafter"]["members"])
    (package / CONFIG).write_text(json.dumps(config))


A = "members.0.draft_ids"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor of no member": (
        lambda p: tensors(p, lambda t: t.update({"members.3.fc": torch.zeros(2)})),
        said("packaging.unexpected") + r" members\.3\.fc",
    ),
    "a member lacks its tensors": (
        lambda p: tensors(
            p, lambda t: [t.pop(name) for name in [*t] if name.startswith("members.2.")]
        ),
        said("packaging.missing_tensor") + r" members\.2\.",
    ),
    "a member's ids missing": (
        lambda p: tensors(p, lambda t: t.pop(A)),
        said("packaging.lacks") + r" members\.0\.draft_ids.* 100",
    ),
    "a member's ids out of range": (
        lambda p: tensors(p, lambda t: t[A][-1].fill_(320)),
        r"members\.0\.draft_ids " + said("packaging.ascending"),
    ),
    "a member's ids of another number": (
        lambda p: members(p, lambda m: m[0].update(draft_vocab=99)),
        r"members\.0\.draft_ids is I64 .* 99",
    ),
    "a member's corpus missing": (
        lambda p: tensors(p, lambda t: t.pop("members.1.corpus_ids")),
        said("packaging.lacks") + r" members\.1\.corpus_ids.*builtin:talk",
    ),
    "NaN": (
        lambda p: tensors(
            p, lambda t: next(v for v in t.values() if v.is_floating_point()).fill_(torch.nan)
        ),
        said("packaging.not_finite"),
    ),
    "no members": (lambda p: members(p, lambda m: m.clear()), said("packaging.listed_drafters")),
    "fewer members": (
        lambda p: members(p, lambda m: m.pop()),
        said("packaging.unexpected") + r" members\.2\.",
    ),
    "members swapped": (
        lambda p: members(p, lambda m: m.reverse()),
        said("packaging.lacks") + r" members\.1\.corpus_ids|members\.0",
    ),
    "a member of no class": (
        lambda p: members(p, lambda m: m[0].pop("_target_")),
        r"members\[0\] " + said("packaging.lacks") + r" _target_",
    ),
    "a member that is text": (
        lambda p: members(p, lambda m: m.__setitem__(0, "ssm")),
        r"members\[0\] " + said("packaging.lacks") + r" _target_",
    ),
    "a foreign class": (
        lambda p: members(p, lambda m: m[1].update(_target_="os.system")),
        "'os.system' " + said("packaging.no_drafter"),
    ),
    "an ensemble in it": (
        lambda p: members(
            p, lambda m: m[1].update(_target_="drafttrain.drafter.ensemble.Ensemble")
        ),
        r"members\[1\] is Ensemble",
    ),
    "a misspelt setting": (
        lambda p: members(p, lambda m: m[1].update(max_mach=m[1].pop("max_match"))),
        said("packaging.nearest") + " max_match",
    ),
    "a setting of another kind": (
        lambda p: members(p, lambda m: m[1].update(max_match="x")),
        r"members\[1\]\.max_match is 'x'",
    ),
    "a setting too few": (
        lambda p: members(p, lambda m: m[2].pop("chunk")),
        r"members\[2\] " + said("packaging.lacks") + r" chunk",
    ),
    "a tree too few": (
        lambda p: (p / DECODING).write_text(write_plan(Plan(forest([2, 2])))),
        r"has 2 trees.* 3 members",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(name: str, package: Path, target: Target) -> None:
    edit, message = DAMAGE[name]
    edit(package)
    with pytest.raises(InputError, match=message):
        drafttrain.load(package, target)
