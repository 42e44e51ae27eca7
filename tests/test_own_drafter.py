"""The notebook's own drafter: the tests that every drafter must pass, and its way through `fit`
into a package and back.

A new drafter's tests may begin as a copy of this file.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import drafttrain.drafter as room
from drafttrain import fit
from drafttrain.decoding import rules
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.flow import Batch
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load as load_package
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from notebooks.own_drafter import LastToken
from tests.decoding.models import PLAIN, PROMPTS, SAMPLED, SMALL, p_value, sharpened
from tests.training.parts import write_tiny_set

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LIMIT = 24
DEFAULTS = {"draft_ids": None, "width": 64, "chunk": 256}
TREES: dict[str, Growth] = {
    "chain": Tree.chain(4),
    "static": Tree.eagle1_static(),
    "dynamic": Dynamic(depth=3, top_k=3, total=8),
    "confident": Confident(k=4, stop_below=0.2),
}


def learned(target: Target, rows: list[list[int]], steps: int) -> tuple[LastToken, list[float]]:
    """Trained on whole rows, with the loss of every update."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    batch = Batch(ids, torch.arange(longest) < lengths[:, None], lengths, torch.arange(len(rows)))
    features = target.features(batch.input_ids, batch.lengths, LastToken.needs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = LastToken(target, **DEFAULTS)
    adam, course = torch.optim.Adam(drafter.parameters(), lr=1e-2), []
    for _ in range(steps):
        adam.zero_grad()
        loss = drafter.loss(batch, features)
        (loss.total / loss.count).backward()
        adam.step()
        course.append(float(loss.total.detach() / loss.count))
    return drafter.eval(), course


@pytest.fixture(scope="module")
def own() -> Any:
    """A target, a drafter that has learned two of three answers, the answers, and the course of its
    loss."""
    target = load.tiny()
    answers, _ = decode(target, None, PROMPTS, PLAIN, max_new_tokens=LIMIT, stop_ids=())
    plain = [output.ids for output in answers]
    drafter, course = learned(
        target, [p + ids for p, ids in zip(PROMPTS[:2], plain[:2], strict=True)], 60
    )
    return target, drafter, plain, course


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("stop", ["none", "mid"])
@pytest.mark.parametrize("limit", [LIMIT, 1, 5])
def test_greedy_text_is_the_targets_own(own: Any, name: str, stop: str, limit: int) -> None:
    target, drafter, plain, _ = own
    stop_ids = {"none": (), "mid": (plain[0][4], plain[1][9])}[stop]
    outputs, tally = decode(
        target, drafter, PROMPTS, Plan(TREES[name]), max_new_tokens=limit, stop_ids=stop_ids
    )
    for ids, output in zip(plain, outputs, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
        assert output.ids == ids[: min(end, limit)]
    if limit == LIMIT and stop == "none":
        assert tally.accepted > 5, "nothing was kept: this test would show nothing"


@pytest.mark.parametrize("policy", [Policy(), Policy(0.8)], ids=["greedy", "sampled"])
def test_a_rows_text_is_its_own(own: Any, policy: Policy) -> None:
    target, drafter, plain, _ = own
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": (plain[0][7],), "seed": 4}
    together, _ = decode(target, drafter, PROMPTS, Plan(Tree.expansion([2, 1]), policy), **settings)
    for row, prompt in enumerate(PROMPTS):
        (alone,), _ = decode(
            target,
            drafter,
            [prompt],
            Plan(Tree.expansion([2, 1]), policy),
            row_numbers=[row],
            **settings,
        )
        assert (alone.ids, alone.runs) == (together[row].ids, together[row].runs)


@pytest.fixture(scope="module")
def small() -> tuple[Target, LastToken]:
    target = load.tiny(**SMALL)
    torch.manual_seed(0)
    return target, LastToken(target, **DEFAULTS).eval()


@pytest.mark.parametrize("name", ["chain ratio", "tree without replacement"])
def test_first_three_tokens_follow_the_targets_distribution(small: Any, name: str) -> None:
    assert p_value(*small, SAMPLED[name], rows=2_000) > 1e-3


def test_a_planted_mistake_is_noticed(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "ratio", sharpened)
    assert p_value(*small, SAMPLED["chain ratio"], rows=8_000) < 1e-6


# --- it learns ------------------------------------------------------------------------------------


def test_it_learns_what_a_last_token_says(own: Any) -> None:
    target, drafter, _, course = own
    assert course[-1] < 0.8 * course[0]
    torch.manual_seed(0)
    untrained = LastToken(target, **DEFAULTS).eval()
    kept = [
        decode(target, one, PROMPTS[:2], Plan(Tree.chain(3)), max_new_tokens=LIMIT, stop_ids=())[1]
        for one in (untrained, drafter)
    ]
    assert kept[1].accepted > kept[0].accepted


def test_a_loss_is_a_sum_over_rows(own: Any) -> None:
    target, drafter, plain, _ = own
    ids, mask = torch.tensor(plain), torch.ones(3, LIMIT, dtype=torch.bool)
    mask[1, 5:], mask[2] = False, False

    def loss(rows: slice) -> Any:
        batch = Batch(
            ids[rows],
            mask[rows],
            torch.full((len(ids[rows]),), LIMIT),
            torch.arange(len(ids[rows])),
        )
        return drafter.loss(batch, target.features(batch.input_ids, batch.lengths, drafter.needs))

    whole, parts = loss(slice(None)), [loss(slice(row, row + 1)) for row in range(3)]
    assert [float(part.count) for part in parts] == [LIMIT - 1, 4, 0] and float(
        parts[2].total.detach()
    ) == 0
    torch.testing.assert_close(whole.total, sum(part.total for part in parts))
    assert set(whole.parts) == set(drafter.loss_parts)


def test_it_is_built_again_from_its_settings(own: Any) -> None:
    target, _, plain, _ = own
    drafter = LastToken(target, draft_ids=sorted({*plain[0], *plain[1]}), width=8, chunk=256)
    settings = json.loads(json.dumps(drafter.settings()))
    again = LastToken(target, **settings)
    assert again.settings() == settings and again.choices < target.vocab_size
    again.load_state_dict(drafter.state_dict())
    outputs, tally = decode(
        target, again.eval(), PROMPTS[:1], Plan(Tree.chain(3)), max_new_tokens=LIMIT, stop_ids=()
    )
    assert outputs[0].ids == plain[0] and tally.drafted


# --- a place of its own ---------------------------------------------------------------------------


@pytest.fixture
def moved_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file among drafttrain's drafters, and a folder with its configuration as the notebook
    shows it."""
    place, name = tmp_path / "drafter", "own_drafter"
    place.mkdir()
    shutil.copy(NOTEBOOKS / f"{name}.py", place)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(place)])
    importlib.invalidate_caches()
    cells = json.loads((NOTEBOOKS / "your_own_drafter.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = re.search(r"```yaml\n(.*?)```", "".join(cells[-1]["source"]), re.DOTALL)
    assert shown
    conf = tmp_path / "conf" / "drafter"
    conf.mkdir(parents=True)
    (conf / f"{name}.yaml").write_text(textwrap.dedent(shown.group(1)), encoding="utf-8")
    yield conf.parent
    sys.modules.pop(f"drafttrain.drafter.{name}", None)
    vars(room).pop(name, None)


def test_one_file_and_one_configuration_are_enough(moved_in: Path, tmp_path: Path) -> None:
    target, run = load.tiny(), tmp_path / "run"
    folder = write_tiny_set(target, tmp_path / "set")
    words = [
        "experiment=smoke",
        "drafter=own_drafter",
        "drafter.width=16",
        f"data.path={folder}",
        f"run_dir={run}",
    ]
    words += [
        "trainer.max_steps=4",
        "eval.every=null",
        "final.prompts=2",
        "final.max_new_tokens=6",
        "final.speed_prompts=0",
    ]
    fit.main(["--config-dir", str(moved_in), *words])
    speculator = load_package(run / "package", target)
    assert type(speculator.drafter).__module__ == "drafttrain.drafter.own_drafter"
    assert speculator.drafter.settings()["width"] == 16 and speculator.drafter.choices == 64
    drafted, tally = speculator.generate(PROMPTS, max_new_tokens=10)
    plain, _ = speculator.generate(PROMPTS, max_new_tokens=10, plan=PLAIN)
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted


def test_one_that_no_package_could_name_is_refused_before_it_is_trained(
    moved_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "experiment=smoke",
        "drafter=own_drafter",
        "drafter._target_=notebooks.own_drafter.LastToken",
    ]
    with pytest.raises(SystemExit) as stopped:
        fit.main(
            [
                "--config-dir",
                str(moved_in),
                *words,
                "data.path=nowhere",
                f"run_dir={tmp_path / 'run'}",
            ]
        )
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and "could be trained and not packaged, put its file into drafttrain/drafter" in said
    )
