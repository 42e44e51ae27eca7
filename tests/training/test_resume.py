"""A run goes on from its own checkpoints, the best one included, or says which of them is not."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint, write_checkpoint
from drafttrain.training.resume import go_on_from, read_best, refuse_other_run
from drafttrain.training.run import Run
from tests.messages import said
from tests.training.parts import Scripted, fit, keeper, module_for

TAUS: list[float | None] = [1.0, 3.0, 2.0, 2.5]


@pytest.fixture(scope="module")
def made(
    target: Target, data: ConversationData, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders of a run whose best is of update 2 of 4, and of one with another seed."""
    folders = {}
    for seed, name in enumerate(("own", "other")):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(seed)
        module, stream = module_for(data, target, max_steps=4, optim={"lr": 1e-2 * (1 + seed)})
        decode = Scripted(TAUS)
        keep = keeper(folder / "checkpoints", decode, every=1, keep=4)
        keep.facts = {"target": {"name": "tiny"}, "seed": seed}
        fit(module, stream, decode, keep)
        folders[name] = folder
    return folders


@pytest.fixture
def run(made: dict[str, Path], tmp_path: Path) -> Run:
    shutil.copytree(made["own"], tmp_path / "run")
    return Run(tmp_path / "run")


def resumed(run: Run, name: str = "last") -> str:
    """What is said when a run goes on from one of its checkpoints."""
    lines: list[str] = []
    go_on_from(run, run.checkpoints / f"{name}.ckpt", lines.append)
    return "; ".join(lines)


def change(path: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    state = read_checkpoint(path)
    how(state)
    state.pop("format")
    write_checkpoint(path, state)


def place(run: Run) -> tuple[int, float | None]:
    """Updates made, and the figure that the run remembers as its best."""
    assert run.resumed is not None
    return run.resumed["progress"]["updates"], run.resumed["keeper"]["best"]


# The kind: `best.ckpt` is taken for the one that `last.ckpt` speaks of, by its name only.
# Neighbours: it is gone, cut, of another seed, of another update of the same run, has other weights
# under the same figures, is a numbered one by that name, is a folder; the run goes on from an
# earlier place, or was killed between its two files; files of earlier versions, without a digest.
@pytest.mark.field("F73")
def test_the_run_s_own_best_is_taken_without_a_word(run: Run) -> None:
    assert resumed(run) == "" and place(run) == (4, 3.0)
    assert run.resumed is not None and len(run.resumed["keeper"]["best_digest"]) == 64
    assert resumed(run, "best") == "" and place(run) == (2, 3.0)
    for name in ("last", "best"):  # As an earlier version wrote them.
        change(run.checkpoints / f"{name}.ckpt", lambda state: state["keeper"].pop("best_digest"))
    assert resumed(run) == "" and place(run) == (4, 3.0)


@pytest.mark.field("F73")
@pytest.mark.parametrize("fault", ["", "other weights", "another update", "cut", "no digest"])
def test_a_lost_best_is_found_among_the_numbered_ones(run: Run, fault: str) -> None:
    best, kept = (run.checkpoints / f"{name}.ckpt" for name in ("best", "update-00000002"))
    intact = read_checkpoint(best)["weights"]
    best.unlink()
    if fault == "other weights":
        change(kept, lambda state: next(iter(state["weights"].values())).add_(1))
    elif fault == "another update":
        shutil.copy(run.checkpoints / "update-00000003.ckpt", kept)
    elif fault == "cut":
        kept.write_bytes(kept.read_bytes()[:-1000])
    elif fault:
        change(run.checkpoints / "last.ckpt", lambda state: state["keeper"].pop("best_digest"))
    said_now = resumed(run)
    if fault:
        assert f"{best} is lost" in said_now and place(run) == (4, None) and not best.exists()
        return
    assert said_now == f"{best} was lost: {kept.name} holds the same weights and was put there"
    assert place(run) == (4, 3.0) and resumed(run) == ""
    assert run.resumed is not None
    taken = read_best(best, run.resumed)["weights"]
    assert all(torch.equal(taken[name], value) for name, value in intact.items())


@pytest.mark.field("F73")
def test_a_lost_best_is_said_and_lends_its_figure_to_no_other(run: Run) -> None:
    best = run.checkpoints / "best.ckpt"
    best.unlink()
    (run.checkpoints / "update-00000002.ckpt").unlink()
    change(run.checkpoints / "last.ckpt", lambda state: state["keeper"].update(without_progress=3))
    said_now = resumed(run)
    assert f"{best} is lost, and the best was val/tau 3.000 of update 2: the best is" in said_now
    assert place(run) == (4, None)
    assert run.resumed is not None and run.resumed["keeper"]["without_progress"] == 0
    state = read_checkpoint(run.checkpoints / "last.ckpt")
    with pytest.raises(InputError, match=said("training.no_checkpoint")):
        read_best(best, state)


@pytest.mark.field("F73")
def test_a_best_that_is_not_the_run_s_own_is_refused_at_once(
    run: Run, made: dict[str, Path]
) -> None:
    best, intact = run.checkpoints / "best.ckpt", made["own"] / "checkpoints" / "best.ckpt"

    def cut() -> None:
        best.write_bytes(intact.read_bytes()[:-1000])

    def foreign() -> None:
        shutil.copy(made["other"] / "checkpoints" / "best.ckpt", best)

    def numbered() -> None:
        shutil.copy(run.checkpoints / "update-00000003.ckpt", best)

    def altered() -> None:
        shutil.copy(intact, best)
        change(best, lambda state: state["weights"].update(first_of(state["weights"])))

    def elsewhere() -> None:
        shutil.copy(intact, best)
        change(best, lambda state: state["progress"].update(updates=3, position=3))

    def folder() -> None:
        best.unlink()
        best.mkdir()

    for what, fault in (
        (cut, said("training.unreadable")),
        (foreign, said("training.another_s_best")),
        (numbered, said("training.no_best")),
        (altered, said("training.no_best")),
        (elsewhere, said("training.no_best")),
        (folder, said("training.unreadable")),
    ):
        what()
        with pytest.raises(InputError, match=fault) as caught:
            resumed(run)
        assert "Put the run's own best.ckpt there, or move it away" in str(caught.value), what
        with pytest.raises(InputError, match=fault):
            read_best(best, read_checkpoint(run.checkpoints / "last.ckpt"))


def first_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One of the weights, changed in one place."""
    name = next(name for name, weight in weights.items() if weight.is_floating_point())
    changed = copy.deepcopy(weights[name])
    changed.view(-1)[0] += 1
    return {name: changed}


@pytest.mark.field("F73")
def test_weights_of_the_right_update_with_another_digest_are_refused(run: Run) -> None:
    """As a second run of the same settings may make them, on another machine."""
    change(
        run.checkpoints / "last.ckpt", lambda state: state["keeper"].update(best_digest="0" * 64)
    )
    with pytest.raises(InputError, match=said("training.other_best")):
        resumed(run)


@pytest.mark.field("F73")
def test_without_a_digest_a_best_of_the_same_figures_is_compared_by_its_run(
    run: Run, made: dict[str, Path]
) -> None:
    """As an earlier version wrote it."""
    change(run.checkpoints / "last.ckpt", lambda state: state["keeper"].pop("best_digest"))
    shutil.copy(made["other"] / "checkpoints" / "best.ckpt", run.checkpoints / "best.ckpt")
    with pytest.raises(InputError, match=said("training.another_s_best")):
        resumed(run)


@pytest.mark.field("F73")
def test_an_earlier_place_in_the_run_does_not_take_a_later_best(run: Run) -> None:
    assert "best.ckpt is of update 2, and the best was val/tau 1.000 of update 1" in resumed(
        run, "update-00000001"
    )
    assert place(run) == (1, None)
    assert resumed(run, "update-00000003") == "" and place(run) == (3, 3.0)


@pytest.mark.field("F73")
def test_a_kill_between_best_and_last_goes_on_from_the_newer_one(run: Run) -> None:
    stepped_back(run)
    for update in (2, 3, 4):
        (run.checkpoints / f"update-{update:08d}.ckpt").unlink()
    os.utime(run.checkpoints / "last.ckpt", (0, 0))
    said_now = resumed(run)
    assert "last.ckpt is of update 1, older than best.ckpt of update 2, which the run" in said_now
    assert place(run) == (2, 3.0) and run.resumed_from == run.checkpoints / "best.ckpt"


def stepped_back(run: Run) -> None:
    """As people do it: an earlier checkpoint takes the place of the last one."""
    shutil.copy(run.checkpoints / "update-00000001.ckpt", run.checkpoints / "last.ckpt")


# The kind: files in a run's folder that somebody replaced are taken for what the run left there.
# Neighbours: an earlier one as the last, with its own time or a fresh one; another best of the same
# run as the best, of another run, without a last one to compare it with; another run's last.
@pytest.mark.field("F73")
@pytest.mark.parametrize("how", ["younger", "with its own time", "next to the best alone"])
def test_a_step_back_is_taken_and_said(run: Run, how: str) -> None:
    stepped_back(run)
    if how == "younger":  # And nothing else shows it.
        for update in (2, 3, 4):
            (run.checkpoints / f"update-{update:08d}.ckpt").unlink()
    else:
        os.utime(run.checkpoints / "last.ckpt", (0, 0))
    if how == "next to the best alone":
        for update in (3, 4):
            (run.checkpoints / f"update-{update:08d}.ckpt").unlink()
    said_now = resumed(run)
    assert "last.ckpt of update 1 was put there after best.ckpt was written: goes on" in said_now
    assert "best.ckpt is of update 2, and the best was val/tau 1.000 of update 1" in said_now
    assert place(run) == (1, None) and run.resumed_from == run.checkpoints / "last.ckpt"


@pytest.mark.field("F73")
def test_a_best_that_was_replaced_is_said_or_refused_where_it_is_asked_for(
    run: Run, made: dict[str, Path]
) -> None:
    best, last = run.checkpoints / "best.ckpt", run.checkpoints / "last.ckpt"
    shutil.copy(run.checkpoints / "update-00000001.ckpt", best)
    said_now = resumed(run, "best")
    assert "goes on from best.ckpt as it is, of update 1; the best that last.ckpt" in said_now
    assert said_now.endswith("remembers is that of update 2") and place(run) == (1, 1.0)
    shutil.copy(made["other"] / "checkpoints" / "best.ckpt", best)
    with pytest.raises(InputError, match=r"of two runs \(seed was 0, is 1\): put the run's own"):
        resumed(run, "best")
    last.unlink()
    assert "best.ckpt cannot be compared with what the run remembers" in resumed(run, "best")


@pytest.mark.field("F73")
def test_another_run_s_checkpoint_is_refused_by_its_name(made: dict[str, Path]) -> None:
    path = made["other"] / "checkpoints" / "last.ckpt"
    state = read_checkpoint(path)
    facts = {**state["facts"], "weights of init_from": None}
    for begun in (None, "a"):  # As an earlier version wrote it.
        refuse_other_run(state, {**facts, "weights of init_from": begun}, {}, lambda _: None, path)
    for name, value in (("seed", 5), ("weights of init_from", "a")):
        state["facts"] = facts
        with pytest.raises(InputError, match=rf"{path} \({name} was .*, is {value}\).*own checkp"):
            refuse_other_run(state, {**facts, name: value}, {}, lambda _: None, path)
