"""Packages that were trained jointly with their target: complete round trips, refused mix-ups, and
words that say what is tuned."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.decoding.plan import TUNED, Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import ADAPTER, CARD, CONFIG, FILES, read_config, read_metrics
from drafttrain.packaging.reading import load_drafter, read_adapter, target_for
from drafttrain.packaging.writing import change_plan, save_package, size_of
from drafttrain.target import load
from drafttrain.target.adapter import tuned
from drafttrain.target.change import change
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.called import surroundings, with_package  # noqa: F401 - for every test
from tests.packaging.made import adapter_of
from tests.training.parts import same

PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11]]


def heads_of(target: Target) -> Medusa:
    drafter = drafters.make(Medusa, target, heads=3)
    with torch.no_grad():
        for number, p in enumerate(drafter.parameters()):
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return drafter.eval()


def packed(folder: Path, drafter: Medusa, target: Target, **metrics: Any) -> Path:
    plan = Plan(Tree.expansion([3, 2, 1]))
    rows = {"settings": {}, "rows": [], **metrics}
    return save_package(
        folder,
        drafter=drafter,
        target=target,
        plan=plan,
        metrics=rows,
        provenance={"command": "a test"},
    )


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def live(target: Target) -> Speculator:
    second = tuned(target, adapter_of(target))
    return Speculator(second, heads_of(second), Plan(Tree.expansion([3, 2, 1])), dtype="float32")


@pytest.fixture(scope="module")
def original(live: Speculator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = live.measure_acceptance(PROMPTS, max_new_tokens=8)
    return packed(
        tmp_path_factory.mktemp("made") / "package",
        live.drafter,
        live.target,
        rows=[measured.row()],
    )  # type: ignore[arg-type]


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "package"))


def texts(speculator: Speculator, plan: Plan | None = None) -> list[list[int]]:
    outputs, _ = speculator.generate(PROMPTS, max_new_tokens=16, plan=plan, seed=0)
    return [output.ids for output in outputs]


def test_round_trip(package: Path, target: Target, live: Speculator) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    speculator = drafttrain.load(package, target, dtype="float32")
    assert speculator.target.original is target and live.target.adapter is not None
    again = speculator.target.adapter
    assert again is not None and again.digest == live.target.adapter.digest
    assert same(dict(again.tensors), dict(live.target.adapter.tensors))
    assert same(dict(speculator.target.model.state_dict()), dict(live.target.model.state_dict()))
    assert same(dict(speculator.drafter.state_dict()), dict(live.drafter.state_dict()))
    plain = Plan(Tree.chain(0))
    assert texts(speculator) == texts(live) == texts(live, plain) == texts(speculator, plain)
    original = Speculator(target, heads_of(target), plain)
    assert texts(original) != texts(live), "the tuned target writes another text"
    assert same(dict(target.model.state_dict()), before) and target.adapter is None
    assert speculator.drafter.target is speculator.target


def test_a_transformers_model_serves_as_target(
    package: Path, target: Target, live: Speculator, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    target.model.save_pretrained(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    ids = [PROMPTS[1]]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    own = model.generate(torch.tensor(ids), **settings)
    drafted = with_package(model, package, ids, **settings)
    outputs, _ = live.generate(ids, max_new_tokens=12)
    assert drafted[0].tolist() == ids[0] + outputs[0].ids and drafted.tolist() != own.tolist()
    assert with_package(model, package, ids, **settings).tolist() == drafted.tolist()
    assert torch.equal(model.generate(torch.tensor(ids), **settings), own), (
        "the model itself is not changed"
    )
    text = (package / "custom_generate" / "generate.py").read_text()
    assert "text is that of the tuned model" in text and "{text}" not in text


def test_the_files_say_what_is_tuned(
    package: Path, original: Path, target: Target, tmp_path: Path
) -> None:
    config = read_config(package)
    assert config["target"]["fingerprint"] == target.fingerprint
    assert config["adapter"]["rank"] == 4 and config["adapter"]["parameters"] > 1000
    assert sorted(str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()) == sorted(
        (*FILES, ADAPTER)
    )
    assert size_of(package) > (package / ADAPTER).stat().st_size
    (row,) = read_metrics(package)["rows"]
    assert row["guarantee"] == "greedy, relative to the tuned target"
    card = (package / CARD).read_text()
    assert (
        "This package changes the target" in card
        and "| greedy, relative to the tuned target |" in card
    )
    assert (
        "*greedy, relative to the tuned target* is the same tokens as the target's greedy "
        "decoding, the target being" in card
    )
    assert "was not measured" in card
    change_plan(package, Plan(Tree.chain(2)))
    assert "This package changes the target" in (package / CARD).read_text()
    second = target_for(package, target)
    from drafttrain.flow import Batch

    ids = torch.tensor([[5, 6, 7, 8, 9]])
    found = change(
        target,
        second,
        [Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([5]), torch.tensor([0]))],
    )
    assert found is not None
    measured = packed(
        tmp_path / "measured", load_drafter(package, second), second, target_change=found
    )  # type: ignore[arg-type]
    assert f"{found['kl']:.4f} nats a token" in (measured / CARD).read_text()
    # An earlier package's adapter does not outlive it.
    plain = packed(package, heads_of(target), target)
    assert not (plain / ADAPTER).exists() and "adapter" not in read_config(plain)
    assert (
        TUNED not in (plain / CARD).read_text()
        and "changes the target" not in (plain / CARD).read_text()
    )


def test_mixing_up_is_refused(
    package: Path, target: Target, live: Speculator, tmp_path: Path
) -> None:
    plain = packed(tmp_path / "plain", heads_of(target), target)
    with pytest.raises(
        InputError, match=said("packaging.another_target") + r".*adapter none there"
    ):
        drafttrain.load(plain, live.target)
    with pytest.raises(InputError, match=said("packaging.original")):
        load_drafter(package, target)
    other = tuned(target, adapter_of(target, linears=["q_proj"]))
    with pytest.raises(InputError, match=said("packaging.another_target") + r".*adapter"):
        drafttrain.load(package, other)
    assert target_for(package, live.target) is live.target
    assert texts(drafttrain.load(package, live.target, dtype="float32")) == texts(live)
    with pytest.raises(InputError, match=said("packaging.another_target") + r".*weights"):
        drafttrain.load(package, load.tiny(seed=1))


def shorter(tensors: dict[str, torch.Tensor]) -> Any:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][:2].clone()


def with_nan(tensors: dict[str, torch.Tensor]) -> Any:
    tensors[sorted(tensors)[1]][0, 0] = float("nan")


def halved(tensors: dict[str, torch.Tensor]) -> Any:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].bfloat16()


def moved(tensors: dict[str, torch.Tensor]) -> Any:
    tensors[sorted(tensors)[0]][0, 0] += 1e-3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.pop(sorted(tensors)[0]),
            said("packaging.missing_tensor") + r" model\.layers\.0\.mlp\.down_proj\.A",
        ),
        (
            lambda tensors: tensors.update({"lm_head.A": torch.zeros(4, 64)}),
            said("packaging.unexpected") + r" lm_head\.A",
        ),
        (shorter, said("packaging.other_shape")),
        (halved, "BF16"),
        (with_nan, said("packaging.not_finite")),
        (moved, said("packaging.other_adapter")),
    ],
)
def test_a_bad_adapter_is_refused(
    package: Path, target: Target, edit: Callable[[Any], Any], message: str
) -> None:
    tensors = load_file(package / ADAPTER)
    edit(tensors)
    save_file(tensors, package / ADAPTER)
    for opened in (drafttrain.load, target_for):
        with pytest.raises(InputError) as refused:
            opened(package, target)
        assert re.search(message, str(refused.value)) and ADAPTER in str(refused.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config.pop("adapter"), said("packaging.nothing_said")),
        (
            lambda config: config["adapter"].pop("digest"),
            "adapter " + said("packaging.lacks") + " digest",
        ),
        (lambda config: config["adapter"].update(rank=0), "adapter.rank is 0"),
        (lambda config: config["adapter"].update(rank=8), said("packaging.other_shape")),
        (lambda config: config["adapter"].update(alpha="x"), "adapter.alpha is x"),
        (lambda config: config["adapter"].update(alpha=9.0), said("packaging.other_adapter")),
        (lambda config: config["adapter"].update(linears="all"), "adapter.linears is all"),
        (lambda config: config["adapter"].update(linears=["lm_head"]), "adapter.linears: lm_head"),
        (
            lambda config: config["adapter"].update(scale=1),
            said("packaging.unknown_key") + " 'scale'",
        ),
    ],
)
def test_a_bad_config_is_refused(
    package: Path, target: Target, edit: Callable[[Any], Any], message: str
) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError) as refused:
        drafttrain.load(package, target)
    assert re.search(message, str(refused.value))


def test_a_package_without_its_adapter_is_refused(package: Path, target: Target) -> None:
    (package / ADAPTER).write_bytes((package / ADAPTER).read_bytes()[:-40])
    with pytest.raises(InputError, match=said("packaging.unreadable")):
        read_adapter(package, target)
    (package / ADAPTER).unlink()
    with pytest.raises(InputError, match=said("packaging.lacks") + r" adapter\.safetensors"):
        drafttrain.load(package, target)
