"""Packages: complete round trips, and refusals that name the fault before anything is loaded or
lost."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError, disk_full
from drafttrain.nn.sampling import Policy
from drafttrain.packaging import decoding, reading, writing
from drafttrain.packaging.manifest import (
    CARD,
    CONFIG,
    DECODING,
    FILES,
    METRICS,
    TENSORS,
    read_config,
    read_metrics,
)
from drafttrain.packaging.reading import load_drafter
from drafttrain.packaging.writing import save_package
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.helpers import file_limit, save_target, tiny_chat_target
from tests.messages import said
from tests.packaging.made import packed

ROWS = [
    {
        "temperature": 0,
        "growth": "chain",
        "nodes": 4,
        "rule": "greedy",
        "tau": 2.125,
        "tau_interval": [2.0, 2.25],
        "accepted_per_round": 1.125,
        "accept_at": [0.5, None],
        "speedup": 0.75,
        "speedup_interval": [0.7, 0.8],
        "rounds": 80,
        "guarantee": "greedy",
    }
]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Eagle1:
    torch.manual_seed(3)
    return drafters.make(Eagle1, target, draft_ids=list(range(1, 201, 2)), bias=True, noise=0.2)


@pytest.fixture(scope="module")
def original(target: Target, drafter: Eagle1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("made") / "package", drafter, target)


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "package"))


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def tensors(package: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = load_file(package / TENSORS)
    edit(found)
    save_file(found, package / TENSORS)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


# --- round trips ----------------------------------------------------------------------------------


def test_round_trip_is_bit_for_bit(package: Path, target: Target, drafter: Eagle1) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = load_drafter(package, target)
    drafttrain.load(package, target)
    assert torch.equal(torch.get_rng_state(), before), "loading moved the random state"
    assert again.settings() == drafter.settings() and not again.training
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(
        torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype
        for name in mine
    )
    assert read_config(package)["trained_length"] == 64


def test_loaded_package_decodes_like_the_live_drafter(
    package: Path, target: Target, drafter: Eagle1
) -> None:
    from drafttrain.decoding.speculator import Speculator

    prompts, plan = [[5, 6, 7], [8, 9]], Plan(Tree.eagle1_static(), Policy(1.0))
    speculator = drafttrain.load(package, target, dtype="float32")
    live = Speculator(target, drafter, plan, dtype="float32")
    assert speculator.plan == Plan(Tree.chain(4))
    ours, _ = speculator.generate(prompts, max_new_tokens=12, plan=plan, seed=4)
    theirs, _ = live.generate(prompts, max_new_tokens=12, seed=4)
    assert [o.ids for o in ours] == [o.ids for o in theirs]
    assert [o.runs for o in ours] == [o.runs for o in theirs]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Tree.chain(0)),
        Plan(Tree.eagle1_static(), Policy(0.7, 20, 0.9), sampled=False, rule="one_hot"),
        Plan(Tree.chain(3), Policy(1.0), sampled=True),
        Plan(Tree.chain(3), Policy(1.0), rule="block"),
        Plan(Tree.eagle1_static(), Policy(1.0), rule="typical:0.05:0.2"),
        Plan(Dynamic(depth=5, top_k=8, total=24), Policy(1.0)),
        Plan(Confident(k=6, stop_below=0.3), Policy(1.0)),
        Plan(Tree.chain(3), Policy(0.0, 0, 1.0, 0.0, 1.3, 4, {5: -2.0, 17: -math.inf, 300: 1e-7})),
        Plan(Tree.chain(3), Policy(1.0, 0, 1.0, 0.05)),
    ],
    ids=[
        "plain",
        "tree",
        "chain",
        "block",
        "typical",
        "dynamic",
        "confident",
        "processed",
        "min_p",
    ],
)
def test_plan_round_trip(plan: Plan, tmp_path: Path) -> None:
    text = decoding.write_plan(plan)
    (tmp_path / DECODING).write_text(text)
    assert decoding.read_plan(tmp_path / DECODING) == plan
    assert ("min_p" in text) == bool(plan.policy.min_p), "what is as usual is not written"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "minp: 0.1",
            said("packaging.unknown_key") + " 'minp', " + said("packaging.nearest") + " min_p",
        ),
        ("processors: []", said("packaging.unknown_key") + " 'processors'"),
        ("min_p: x", "min_p is x"),
        ("logit_bias: [1, 2]", "logit_bias is"),
        ("logit_bias: {a: 2}", "logit_bias names token 'a'"),
        ("min_new_tokens: 1.5", "min_new_tokens is 1.5"),
    ],
)
def test_policy_keys_that_are_none_are_refused(more: str, message: str, tmp_path: Path) -> None:
    text = decoding.write_plan(Plan(Tree.chain(2)))
    (tmp_path / DECODING).write_text(text.replace("top_p: 1.0}", f"top_p: 1.0, {more}}}"))
    with pytest.raises(InputError, match=message):
        decoding.read_plan(tmp_path / DECODING)


def test_processors_are_not_written() -> None:
    with pytest.raises(InputError, match="policy's processors"):
        decoding.write_plan(Plan(Tree.chain(2), Policy(processors=(lambda ids, scores: scores,))))


@pytest.mark.field("F30")
def test_bfloat16_halves_the_weights(target: Target, drafter: Eagle1, tmp_path: Path) -> None:
    sizes: list[str] = []
    full = packed(tmp_path / "full", drafter, target)
    half = packed(tmp_path / "half", drafter, target, dtype="bfloat16", say=sizes.append)
    assert (half / TENSORS).stat().st_size < 0.6 * (full / TENSORS).stat().st_size
    assert "MB" in sizes[0] and "bfloat16" in sizes[0]
    again = load_drafter(half, target).state_dict()
    for name, tensor in drafter.state_dict().items():
        expected = (
            tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor
        )
        assert torch.equal(again[name], expected), name
    with pytest.raises(InputError, match="float16"):
        packed(tmp_path / "other", drafter, target, dtype="float16")


def test_a_full_vocabulary_needs_no_ids(target: Target, tmp_path: Path) -> None:
    folder = packed(tmp_path / "package", drafters.make(Eagle1, target), target)
    assert "draft_ids" not in load_file(folder / TENSORS)
    assert load_drafter(folder, target).settings()["draft_ids"] is None


@pytest.mark.field("F30")
def test_nothing_of_the_vocabulary_is_inside(package: Path, target: Target) -> None:
    sizes = {name: tuple(t.shape) for name, t in load_file(package / TENSORS).items()}
    assert sizes and not [name for name, shape in sizes.items() if target.vocab_size in shape]
    assert (
        sum(p.stat().st_size for p in package.rglob("*") if p.is_file())
        < 4 * target.vocab_size * target.width * 4
    )


def test_a_borrowed_embedding_is_never_written(
    target: Target, drafter: Eagle1, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    odd = drafters.make(Eagle1, target)
    for lent in (target.embedding.weight, torch.nn.Parameter(target.embedding.weight.data[1:])):
        odd.register_parameter("embedding", lent)
        with pytest.raises(ValueError, match="^embedding " + said("packaging.borrowed")):
            packed(tmp_path / "package", odd, target)
    assert not any(tmp_path.iterdir())


# The kind: whether a weight is the target's is asked of its values. Neighbours: every drafter with
# a projection or an embedding of its own that starts as a copy (medusa, hydra_heads, ssm), before
# its first update, after one of rate 0, or with a gradient that is 0.
@pytest.mark.field("F83")
@pytest.mark.parametrize("kind", ["medusa", "hydra_heads", "ssm"])
def test_a_copy_that_did_not_move_is_the_drafter_s_own(
    target: Target, tmp_path: Path, kind: str
) -> None:
    made: dict[str, Callable[[], Drafter]] = {
        "medusa": lambda: drafters.make(Medusa, target, own_head=True),
        "hydra_heads": lambda: drafters.make(HydraHeads, target, own_head=True),
        "ssm": lambda: drafters.make(Ssm, target, layers=[0], own=["embedding", "head"]),
    }
    drafter = made[kind]()
    packed(tmp_path / "package", drafter, target)
    again = load_drafter(tmp_path / "package", target)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name].to(weight), weight), name


@pytest.mark.field("F64")
def test_the_layout_and_the_card(target: Target, drafter: Eagle1, tmp_path: Path) -> None:
    folder = packed(
        tmp_path / "package",
        drafter,
        target,
        metrics={"settings": {"prompts": 3}, "rows": ROWS},
        licence="MIT",
    )
    assert sorted(snapshot(folder)) == sorted(FILES)
    card = (folder / CARD).read_text()
    for word in (
        "tiny-llama",
        "2.12 [2.00, 2.25]",
        "0.75x",
        "**slower**",
        "0.50 -",
        "MIT",
        "64 tokens",
        "prompts 3",
    ):
        assert word in card, word
    assert "drafttrain.load(" in card and "custom_generate=" in card
    assert read_metrics(folder)["rows"] == ROWS
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "drafttrain\n"


def test_importing_only_the_name_is_light() -> None:
    code = (
        "import sys, drafttrain; drafttrain.__version__; "
        "print(sorted({'torch', 'transformers', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert callable(drafttrain.load) and "load" in dir(drafttrain)
    with pytest.raises(AttributeError, match="lode"):
        _ = drafttrain.lode


@pytest.mark.field("F15")
@pytest.mark.parametrize("largest", ["1GB", "60KB"], ids=["one file", "several"])
def test_a_target_with_tied_embeddings_in_any_number_of_files(largest: str, tmp_path: Path) -> None:
    """Its head is its embedding; a draft head of another size is not tied to anything."""
    tied = load.tiny(tie_word_embeddings=True)
    tied.model.save_pretrained(tmp_path / "target", max_shard_size=largest)
    files = list((tmp_path / "target").glob("*.safetensors"))
    assert (len(files) > 1) == (largest != "1GB")
    again = load.hf(
        str(tmp_path / "target"), dtype="float32", device="cpu", attention="sdpa", pack=False
    )
    assert (
        again.fingerprint == tied.fingerprint
        and again.output.weight.data_ptr() == again.embedding.weight.data_ptr()
    )
    hidden = torch.randn(3, tied.width)
    assert torch.equal(again.head(hidden), tied.head(hidden))
    for name, ids in (("full", None), ("reduced", list(range(1, 201, 2)))):
        torch.manual_seed(3)
        drafter = drafters.make(Eagle1, tied, draft_ids=ids).eval()
        other = load_drafter(packed(tmp_path / name, drafter, tied), again)
        assert torch.equal(other.head(hidden), drafter.head(hidden)) and other.choices == (
            100 if ids else 320
        )
        state = drafter.state_dict()
        assert all(torch.equal(state[key], value) for key, value in other.state_dict().items())
        drafted, _ = drafttrain.load(tmp_path / name, again, dtype="float32").generate(
            [[5, 6, 7]], max_new_tokens=8
        )
        plain, _ = drafttrain.load(tmp_path / name, tied).generate(
            [[5, 6, 7]], max_new_tokens=8, plan=Plan(Tree.chain(0))
        )
        assert drafted[0].ids == plain[0].ids


@pytest.mark.field("F44")
def test_the_attention_that_a_target_was_trained_with_is_no_part_of_a_package(
    tmp_path: Path,
) -> None:
    """A package names none: it decodes with whichever its target was loaded with here, to the same
    text."""
    texts = []
    one, other = load.tiny(attention="eager"), load.tiny(attention="sdpa")
    torch.manual_seed(3)
    folder = packed(tmp_path / "package", drafters.make(Eagle1, one).eval(), one)
    assert one.fingerprint == other.fingerprint
    assert not any(
        word in (folder / CONFIG).read_text() + (folder / DECODING).read_text()
        for word in ("eager", "sdpa")
    )
    for target in (one, other):
        outputs, tally = drafttrain.load(folder, target, dtype="float32").generate(
            [[5, 6, 7], [8, 9]], max_new_tokens=12
        )
        texts.append([output.ids for output in outputs])
        assert tally.drafted
    assert texts[0] == texts[1]


# --- what is refused on reading -------------------------------------------------------------------

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (
        lambda p: tensors(p, lambda t: t.pop("fc.weight")),
        said("packaging.missing_tensor") + r" fc\.weight",
    ),
    "renamed tensor": (
        lambda p: tensors(p, lambda t: t.update({"fc.wait": t.pop("fc.weight")})),
        said("packaging.missing_tensor")
        + r" fc\.weight; "
        + said("packaging.unexpected")
        + r" fc\.wait",
    ),
    "added tensor": (
        lambda p: tensors(p, lambda t: t.update(stranger=torch.zeros(2))),
        said("packaging.unexpected") + " stranger",
    ),
    "wrong shape": (
        lambda p: tensors(p, lambda t: t.update({"fc.weight": torch.zeros(64, 64)})),
        r"fc\.weight is F32 \[64, 64\], needs F32 \[64, 128\]",
    ),
    "wrong dtype": (
        lambda p: tensors(p, lambda t: t.update({"fc.bias": t["fc.bias"].double()})),
        r"fc\.bias is F64 \[64\], needs F32 \[64\]",
    ),
    "NaN": (
        lambda p: tensors(p, lambda t: t["fc.bias"][1].fill_(float("nan"))),
        said("packaging.not_finite") + r" fc\.bias",
    ),
    "infinity": (
        lambda p: tensors(p, lambda t: t["fc.weight"][0, 0].fill_(float("inf"))),
        said("packaging.not_finite") + r".*fc\.weight",
    ),
    "ids out of range": (
        lambda p: tensors(p, lambda t: t["draft_ids"][-1].fill_(320)),
        r"draft_ids " + said("packaging.ascending") + r".*0\.\.319",
    ),
    "ids negative": (
        lambda p: tensors(p, lambda t: t["draft_ids"][0].fill_(-1)),
        "draft_ids " + said("packaging.ascending"),
    ),
    "ids twice": (
        lambda p: tensors(p, lambda t: t["draft_ids"][1].fill_(1)),
        "draft_ids " + said("packaging.ascending"),
    ),
    "ids unsorted": (
        lambda p: tensors(p, lambda t: t["draft_ids"][1].fill_(9)),
        "draft_ids " + said("packaging.ascending"),
    ),
    "ids missing": (
        lambda p: tensors(p, lambda t: t.pop("draft_ids")),
        said("packaging.lacks") + " draft_ids",
    ),
    "ids too many": (
        lambda p: tensors(p, lambda t: t.update(draft_ids=torch.arange(10**5))),
        r"draft_ids is I64.*\[100000\]",
    ),
    "ids of another kind": (
        lambda p: tensors(p, lambda t: t.update(draft_ids=t["draft_ids"].float())),
        "draft_ids is F32",
    ),
    "no safetensors": (
        lambda p: (p / TENSORS).write_bytes(b"\x80\x04not tensors"),
        said("packaging.unreadable"),
    ),
    "cut off": (
        lambda p: os.truncate(p / TENSORS, (p / TENSORS).stat().st_size // 2),
        said("packaging.unreadable"),
    ),
    "file missing": (
        lambda p: (p / TENSORS).unlink(),
        said("packaging.lacks") + rf" {re.escape(TENSORS)}",
    ),
    "plan missing": (
        lambda p: (p / DECODING).unlink(),
        said("packaging.lacks") + rf" {re.escape(DECODING)}",
    ),
    "config is no JSON": (lambda p: (p / CONFIG).write_text("{"), said("packaging.unreadable")),
    "config nests without end": (
        lambda p: (p / CONFIG).write_text("[" * 10**6),
        said("packaging.unreadable"),
    ),
    "config is a list": (
        lambda p: (p / CONFIG).write_text("[]"),
        "format None, " + said("packaging.version") + " 1",
    ),
    "a key twice": (
        lambda p: (p / CONFIG).write_text('{"format": 1, "format": 1}'),
        "'format' " + said("packaging.twice"),
    ),
    "future format": (
        lambda p: change(p / CONFIG, lambda c: c.update(format=2)),
        "format 2.*" + said("packaging.newer"),
    ),
    "format true": (
        lambda p: change(p / CONFIG, lambda c: c.update(format=True)),
        "format True, " + said("packaging.version") + " 1",
    ),
    "unknown key": (
        lambda p: change(p / CONFIG, lambda c: c.update(mode="fast")),
        said("packaging.unknown_key") + " 'mode'",
    ),
    "misspelt key": (
        lambda p: change(p / CONFIG, lambda c: c.update(nedes=c.pop("needs"))),
        "'nedes', " + said("packaging.nearest") + " needs",
    ),
    "misspelt setting": (
        lambda p: change(
            p / CONFIG, lambda c: c["drafter"].update(niose=c["drafter"].pop("noise"))
        ),
        "'niose', " + said("packaging.nearest") + " noise",
    ),
    "setting missing": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].pop("bias")),
        "drafter " + said("packaging.lacks") + " bias",
    ),
    "setting of another kind": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].update(chunk="many")),
        r"chunk is 'many'",
    ),
    "setting not a number": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].update(noise=float("nan"))),
        "NaN",
    ),
    "setting out of range": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].update(noise=-1.0)),
        "noise",
    ),
    "setting for other tensors": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].update(bias=False)),
        said("packaging.unexpected") + r" fc\.bias",
    ),
    "layers not recorded": (
        lambda p: change(p / CONFIG, lambda c: c["needs"].pop("layers")),
        "needs " + said("packaging.lacks") + " layers",
    ),
    "other layers": (
        lambda p: change(p / CONFIG, lambda c: c["needs"].update(layers=[1])),
        said("packaging.needs_differ") + r" .*\[1\]",
    ),
    "no class": (
        lambda p: change(p / CONFIG, lambda c: c["drafter"].pop("_target_")),
        said("packaging.lacks") + " _target_",
    ),
    "other width": (
        lambda p: change(p / CONFIG, lambda c: c["shape"].update(width=128)),
        r"shape\.width is 128",
    ),
    "other dtype": (
        lambda p: change(p / CONFIG, lambda c: c["shape"].update(dtype="float8")),
        "float8",
    ),
    "other target": (
        lambda p: change(p / CONFIG, lambda c: c["target"]["fingerprint"].update(weights="0123")),
        said("packaging.another_target") + r" .weights 0123 there.*tiny-llama",
    ),
    "fingerprint cut": (
        lambda p: change(p / CONFIG, lambda c: c["target"]["fingerprint"].pop("weights")),
        said("packaging.no_fingerprint") + " weights",
    ),
    "length of another kind": (
        lambda p: change(p / CONFIG, lambda c: c.update(trained_length="long")),
        "trained_length",
    ),
    "pickled weights": (
        lambda p: (p / "drafter.bin").write_bytes(b""),
        r"drafter\.bin.*" + said("packaging.only_safetensors"),
    ),
    "plan: unknown key": (
        lambda p: edit_plan(p, "rule: auto", "rule: auto\nbeams: 3"),
        said("packaging.unknown_key") + " 'beams'",
    ),
    "plan: unknown rule": (lambda p: edit_plan(p, "rule: auto", "rule: magic"), "rule magic"),
    "plan: a rule that is a list": (
        lambda p: edit_plan(p, "rule: auto", "rule: [block]"),
        r"rule .*block",
    ),
    "plan: a rule for sampled text": (
        lambda p: edit_plan(p, "rule: auto", "rule: one_hot"),
        said("packaging.unfit_rule"),
    ),
    "plan: a rule that does not fit": (
        lambda p: edit_plan(p, "sampled: auto", "sampled: true"),
        said("packaging.unfit_sampling"),
    ),
    "plan: repeated path": (
        lambda p: edit_plan(p, "  - [0, 0]\n", "  - [0]\n"),
        said("packaging.twice_path"),
    ),
    "plan: orphan": (
        lambda p: edit_plan(p, "  - [0, 0]\n", "  - [1, 0]\n"),
        said("packaging.no_parent"),
    ),
    "plan: no path": (
        lambda p: edit_plan(p, "  - [0, 0]\n", "  - chain\n"),
        "'?chain'? " + said("packaging.no_path"),
    ),
    "plan: budget too small": (
        lambda p: edit_plan(p, "nodes: 4", "nodes: 3"),
        r"budget\.nodes is 3",
    ),
    "plan: endless tree": (
        lambda p: edit_plan(p, "tree:", "tree: 1000000000\nold:"),
        said("packaging.unknown_key") + " 'old'",
    ),
    "plan: python object": (
        lambda p: edit_plan(
            p, "rule: auto", "rule: !!python/object/apply:os.system ['touch marker']"
        ),
        said("packaging.unsafe_yaml"),
    ),
    "plan: what refers elsewhere": (
        lambda p: edit_plan(p, "sampled: auto", "sampled: &a [1, 2]\nrule2: *a"),
        said("packaging.unreadable") + r": .*" + said("packaging.refers") + r" \(\*a\)",
    ),
    "plan: what unfolds without end": (
        lambda p: edit_plan(p, "sampled: auto", f"sampled:\n{laughs()}"),
        said("packaging.refers"),
    ),
    "plan: a key twice": (
        lambda p: edit_plan(p, "rule: auto", "rule: auto\nrule: block"),
        r"'rule'.*twice",
    ),
    "plan: a pipe": (
        lambda p: ((p / DECODING).unlink(), os.mkfifo(p / DECODING)),
        said("packaging.lacks") + r" decoding\.yaml",
    ),
    "plan: a number beyond floats": (
        lambda p: edit_plan(p, "temperature: 0.0", "temperature: 1" + "0" * 400),
        said("packaging.too_long_number"),
    ),
    "a name that is none": (
        lambda p: change(p / CONFIG, lambda c: c["target"].update(name=5)),
        r"target\.name is 5",
    ),
    "a licence that is none": (
        lambda p: change(p / CONFIG, lambda c: c["target"].update(licence=[])),
        r"target\.licence is",
    ),
    "parameters in words": (
        lambda p: change(p / CONFIG, lambda c: c["shape"].update(parameters="many")),
        r"shape\.parameters is many",
    ),
    "plan: no YAML": (lambda p: (p / DECODING).write_text("a: ["), said("packaging.unreadable")),
}


def laughs() -> str:
    """A few lines of YAML that unfold to 10^12 entries."""
    lines = ["    a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join(lines)


def edit_plan(package: Path, old: str, new: str) -> None:
    text = (package / DECODING).read_text()
    assert old in text
    (package / DECODING).write_text(text.replace(old, new, 1))


@pytest.mark.field("F37", "F40", "F43")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(
    name: str, package: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package.parent)
    edit, message = DAMAGE[name]
    edit(package)
    with pytest.raises(InputError, match=message) as caught:
        drafttrain.load(package, target)
    assert "package" in str(caught.value)
    assert not (package.parent / "marker").exists()


def test_the_card_has_tau_by_kind_of_the_best_way(
    target: Target, drafter: Eagle1, tmp_path: Path
) -> None:
    kinds = [
        {"category": "maths|x", "prompts": 2, "rounds": 9, "tau": 2.5, "tau_interval": [2.0, 3.0]},
        {"category": "code", "prompts": 1, "rounds": 4, "tau": 1.25, "tau_prompt_mean": 1.5},
    ]
    best = {**ROWS[0], "tau": 2.25, "nodes": 9, "by_category": kinds, "tau_prompt_mean": 1.875}
    rows = [{**ROWS[0], "by_category": kinds[1:]}, best, {**ROWS[0], "tau": 9.0}]
    metrics = {"settings": {}, "rows": rows}
    text = (packed(tmp_path / "package", drafter, target, metrics=metrics) / CARD).read_text()
    assert "By kind of task, with chain 9 at temperature 0:" in text
    assert "| maths/x | 2.50 [2.00, 3.00] | - | 2 | 9 |\n| code | 1.25 | 1.50 | 1 | 4 |\n" in text
    assert "| 2.25 [2.00, 2.25] | 1.88 |" in text
    metrics = {"settings": {}, "rows": ROWS}
    text = (packed(tmp_path / "older", drafter, target, metrics=metrics) / CARD).read_text()
    assert "kind of task" not in text and "| 2.12 [2.00, 2.25] | - |" in text


@pytest.mark.parametrize(
    "rows",
    [
        [
            {
                "accept_at": 5,
                "speedup": "fast",
                "tau": [1],
                "tau_interval": [],
                "temperature": 10**400,
            }
        ],
        [
            {
                "speedup": True,
                "speedup_interval": [1],
                "nodes": {},
                "growth": None,
                "rule": ["|"],
                "guarantee": {"a": 1},
            }
        ],
        [
            {
                "accept_at": [None, "x", [2]],
                "tau": 1e308,
                "tau_interval": ["a", "b"],
                "rounds": "\n| x",
            }
        ],
        [{"tau": 1.5, "by_category": [3, {"category": ["|"], "tau": "x", "prompts": None}]}],
        [{"tau": 1.5, "by_category": "kinds"}],
        [3],
        "rows",
    ],
)
def test_garbage_in_the_metrics_does_not_keep_a_plan_from_being_changed(
    rows: Any, package: Path, target: Target
) -> None:
    (package / METRICS).write_text(
        json.dumps({"settings": [1], "rows": rows, "target_change": [0]})
    )
    writing.check_change(package)
    writing.change_plan(package, Plan(Tree.chain(2)))
    assert drafttrain.load(package, target).plan.tree == Tree.chain(2)
    assert "(`decoding.yaml`)" in (package / CARD).read_text()


def test_metrics_that_are_no_file_are_not_waited_for(package: Path) -> None:
    (package / METRICS).unlink()
    os.mkfifo(package / METRICS)
    assert read_metrics(package)["rows"] == []


def test_changing_a_plan_writes_through_no_link(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in (DECODING, CARD):
        (package / f".{name}.new").symlink_to(tmp_path / "mine")
    writing.change_plan(package, Plan(Tree.chain(2)))
    assert (tmp_path / "mine").read_text() == "mine"
    assert decoding.read_plan(package / DECODING).tree == Tree.chain(2)
    assert not [path.name for path in package.iterdir() if path.name.startswith(".")]
    (package / f".{CARD}.new").mkdir()
    with pytest.raises(InputError, match=r"README\.md " + said("packaging.written")):
        writing.change_plan(package, Plan(Tree.chain(3)))


def test_a_package_that_cannot_be_changed_is_found_early(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing.check_change(package)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="write=false"):
        writing.check_change(package)


def test_a_long_chain_is_read_in_a_moment(target: Target, tmp_path: Path) -> None:
    plan = Plan(Tree.chain(1000))
    (tmp_path / DECODING).write_text(decoding.write_plan(plan))
    assert (tmp_path / DECODING).stat().st_size < 2000 and decoding.read_plan(
        tmp_path / DECODING
    ) == plan


@pytest.mark.field("F67")
@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.nn.Linear",
        "drafttrain.drafter.eagle1.Target",
        "drafttrain.drafter.eagle1.torch.nn.Linear",
        "drafttrain.drafter.base.Drafter",
        "drafttrain.drafter.base.Autoregressive",
        "drafttrain.drafter.nowhere.Eagle1",
        "drafttrain.drafter.eagle1.Autoregressive",
        "drafttrain.target.load.hf",
        "drafttrain.drafter..eagle1.Eagle1",
        "drafttrain.drafter.eagle1.Eagle1\n",
        "evil.Evil",
    ],
)
def test_foreign_classes_are_never_imported(
    name: str, package: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("open('marker', 'w')\nclass Evil: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    change(package / CONFIG, lambda c: c["drafter"].update(_target_=name))
    with pytest.raises(InputError, match=said("packaging.no_drafter")):
        drafttrain.load(package, target)
    assert not (tmp_path / "marker").exists() and "evil" not in sys.modules


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.field("F67")
@pytest.mark.parametrize(
    "name", ["drafter.bin", "pytorch_model.bin", "drafter.pt", "drafter.ckpt", TENSORS]
)
def test_nothing_is_unpickled(name: str, package: Path, target: Target, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (package / name).write_bytes(pickle.dumps({"weights": _Marker(marker)}))
    with pytest.raises(InputError, match=re.escape(name)):
        drafttrain.load(package, target)
    assert not marker.exists()


def test_sizes_are_compared_before_anything_is_read(
    package: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors(package, lambda t: t.update({"fc.weight": torch.zeros(2048, 2048)}))

    class Watched:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.file = real(*given, **named)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *given: Any) -> None:
            self.file.__exit__(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Any:
            assert name == "draft_ids", f"{name} was read"
            return self.file.get_tensor(name)

    real = reading.safe_open
    monkeypatch.setattr(reading, "safe_open", Watched)
    with pytest.raises(InputError, match=r"\[2048, 2048\]"):
        load_drafter(package, target)


def test_another_target_is_refused(package: Path) -> None:
    with pytest.raises(InputError, match=said("packaging.another_target") + r" \(weights"):
        drafttrain.load(package, load.tiny(seed=1))
    with pytest.raises(InputError, match=said("packaging.another_target") + r" \(config"):
        drafttrain.load(package, load.tiny(vocab_size=330))


def test_a_target_of_another_dtype_is_the_same_target(package: Path) -> None:
    outputs, _ = drafttrain.load(package, load.tiny(dtype="bfloat16")).generate(
        [[5, 6, 7]], max_new_tokens=5
    )
    assert len(outputs[0].ids) == 5


def test_a_target_without_its_tokenizer_is_known_by_its_weights(tmp_path: Path) -> None:
    chat = tiny_chat_target()
    folder = packed(tmp_path / "package", drafters.make(Eagle1, chat), chat)
    drafttrain.load(folder, Target(chat.model, None, "bare"))
    drafttrain.load(folder, chat.model)


def test_what_is_no_package_says_what_it_is(tmp_path: Path, target: Target) -> None:
    with pytest.raises(InputError, match=said("packaging.not_exist")):
        drafttrain.load(tmp_path / "nowhere", target)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=said("packaging.is_file")):
        drafttrain.load(tmp_path / "file", target)
    with pytest.raises(InputError, match=said("packaging.no_package")):
        drafttrain.load(tmp_path, target)
    packed(tmp_path / "run" / "package", drafters.make(Eagle1, target), target)
    with pytest.raises(InputError, match=said("packaging.a_run")):
        drafttrain.load(tmp_path / "run", target)
    with pytest.raises(InputError, match=said("packaging.looks_like_target")):
        drafttrain.load(save_target(tiny_chat_target(), tmp_path / "target"), target)


@pytest.mark.field("F42")
def test_a_tree_too_deep_is_capped_with_a_message(
    package: Path, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Eagle1, "max_depth", property(lambda self: 2))
    speculator = drafttrain.load(package, target)
    assert speculator.plan.tree == Tree.chain(2)
    assert re.search(r"4 deep.* 2", caplog.text)


@pytest.mark.field("F42")
def test_a_tree_wider_than_the_draft_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    small = drafters.make(Eagle1, target, draft_ids=[1, 2, 3])
    with pytest.raises(InputError, match="4 children"):
        packed(tmp_path / "package", small, target, plan=Plan(Tree.eagle1_static()))


@pytest.mark.parametrize(
    "value, size",
    [
        ("static", 25),
        ("eagle1_static", 25),
        ("plain", 0),
        (0, 0),
        (3, 3),
        ("chain:3", 3),
        ("5", 5),
        ("expand:2x2x1", 10),
        ([[0], [1], [0, 0]], 3),
        ("[[0],[1],[0,0]]", 3),
        ([], 0),
        ("medusa", 63),
        ("dynamic:5x8x24", 24),
        ({"growth": "dynamic", "depth": 5, "top_k": 8, "total": 24}, 24),
        ({"growth": "chain", "k": 6, "stop_below": 0.3}, 6),
    ],
)
def test_trees_by_name(value: Any, size: int) -> None:
    assert decoding.tree_of(value).size == size


@pytest.mark.parametrize(
    "value",
    [
        "eagle",
        "chain",
        "chain:x",
        "expand:",
        "expand:0",
        "expand:9x9x9x9",
        10**9,
        -1,
        True,
        1.5,
        None,
        {},
        "[[0]",
        [[0], "x"],
        [[0.5]],
        [[1]],
        [[0], [0]],
        [[]],
        [[0, 0]],
        "dynamic",
        "dynamic:5x8",
        "dynamic:5x8x2",
        "dynamic:99x99x2000",
        {"growth": "dynamic"},
        {"growth": "octopus"},
        {"growth": []},
        {"growth": "dynamic", "depth": 2, "top_k": 2, "total": 4, "more": 1},
        {"growth": "dynamic", "depth": "2", "top_k": 2, "total": 4},
        {"growth": "chain", "k": 6, "stop_below": "x"},
    ],
)
def test_trees_that_are_none(value: Any) -> None:
    with pytest.raises(InputError):
        decoding.tree_of(value)


# --- what is refused on writing -------------------------------------------------------------------


def test_a_package_is_replaced_at_once(package: Path, target: Target, drafter: Eagle1) -> None:
    packed(package, drafter, target, plan=Plan(Tree.chain(2)))
    assert drafttrain.load(package, target).plan.tree == Tree.chain(2)
    assert [p.name for p in package.parent.iterdir()] == ["package"], (
        "something was left next to it"
    )


def test_an_empty_folder_is_used(target: Target, drafter: Eagle1, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    drafttrain.load(packed(tmp_path / "package", drafter, target), target)


@pytest.mark.field("F69")
@pytest.mark.parametrize(
    "name", ["thesis.tex", ".hidden", "custom_generate/mine.py", "sub/deep.txt"]
)
def test_foreign_files_are_refused_and_kept(
    name: str, package: Path, target: Target, drafter: Eagle1
) -> None:
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("mine")
    before = snapshot(package)
    with pytest.raises(
        InputError, match=re.escape(name.split("/")[0] if name.startswith("sub") else name)
    ):
        packed(package, drafter, target)
    assert snapshot(package) == before


def test_a_folder_that_is_no_package_is_kept(
    target: Target, drafter: Eagle1, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"README\.md.*" + said("packaging.of_another")):
        packed(folder, drafter, target)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.field("F69")
def test_links_are_refused(package: Path, target: Target, drafter: Eagle1, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(package)
    before = snapshot(package)
    with pytest.raises(InputError, match="/link " + said("packaging.is_link")):
        packed(link, drafter, target)
    (tmp_path / "notes.md").write_text("mine")
    (package / CARD).unlink()
    (package / CARD).symlink_to(tmp_path / "notes.md")
    with pytest.raises(InputError, match=r"\(README\.md\)"):
        packed(package, drafter, target)
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert {**snapshot(package), CARD: before[CARD]} == before


@pytest.mark.field("F69")
def test_the_folder_the_program_runs_in_is_refused(
    target: Target, drafter: Eagle1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "..", tmp_path / "here"):
        with pytest.raises(InputError, match=said("packaging.in_use")):
            packed(Path(place), drafter, target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=said("packaging.is_file")):
        packed(tmp_path / "file", drafter, target)


def test_bad_weights_leave_the_old_package(package: Path, target: Target) -> None:
    before = snapshot(package)
    torch.manual_seed(0)
    broken = drafters.make(Eagle1, target)
    with torch.no_grad():
        broken.fc.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=said("packaging.not_finite") + r" fc\.weight"):
        packed(package, broken, target)
    assert snapshot(package) == before


@pytest.mark.parametrize("when", ["writing", "swapping"])
def test_a_full_disk_leaves_the_old_package(
    when: str, package: Path, target: Target, drafter: Eagle1, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(package)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if when == "writing":
        monkeypatch.setattr(writing, "save_file", full)
    else:
        rename = Path.rename
        monkeypatch.setattr(
            Path,
            "rename",
            lambda self, goal: (
                full()
                if (self / METRICS).exists() and goal == package and is_new(self)
                else rename(self, goal)
            ),
        )

    def is_new(folder: Path) -> bool:
        return "-old-" not in folder.name

    with pytest.raises(OSError, match=said("packaging.no_space")):
        packed(package, drafter, target, plan=Plan(Tree.chain(1)))
    assert snapshot(package) == before
    assert [p.name for p in package.parent.iterdir()] == ["package"]


def test_a_limit_of_file_sizes_leaves_the_old_package(
    package: Path, target: Target, drafter: Eagle1
) -> None:
    before, size = snapshot(package), (package / TENSORS).stat().st_size
    for limit in (10, size // 2, size - 1):
        with file_limit(limit), pytest.raises((OSError, SafetensorError)) as caught:
            packed(package, drafter, target, plan=Plan(Tree.chain(1)))
        assert "a file grew larger than this system allows" in disk_full(caught.value)
        assert snapshot(package) == before and [p.name for p in package.parent.iterdir()] == [
            "package"
        ]


def test_an_interruption_between_the_two_moves_leaves_the_old_package(
    package: Path, target: Target, drafter: Eagle1, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = snapshot(package), Path.rename

    def moved_and_interrupted(self: Path, goal: Path) -> Path:
        found = rename(self, goal)
        if "-old-" in Path(goal).name:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Path, "rename", moved_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed(package, drafter, target, plan=Plan(Tree.chain(1)))
    assert snapshot(package) == before
    assert [p.name for p in package.parent.iterdir()] == ["package"]


def test_metrics_need_their_form(target: Target, drafter: Eagle1, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows"):
        save_package(
            tmp_path / "p",
            drafter=drafter,
            target=target,
            plan=Plan(Tree.chain(1)),
            metrics={},
            provenance={},
        )
    with pytest.raises(ValueError, match="JSON"):
        packed(tmp_path / "p", drafter, target, metrics={"rows": [{"tau": float("nan")}]})
    assert not (tmp_path / "p").exists()
