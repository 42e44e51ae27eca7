"""What is kept, what is best, and that a stopped run goes on as if it had not been."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError, disk_full
from drafttrain.flow import Tally
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import check_complete, read_checkpoint, write_checkpoint
from drafttrain.training.decode_callback import Evaluated
from drafttrain.training.module import DraftModule, over_processes
from drafttrain.training.resume import facts_of, refuse_other_run
from tests.helpers import file_limit
from tests.messages import said
from tests.training.parts import Scripted, Watch, fit, keeper, module_for, same, weights_of

MEASURED = {"measured_at": 1, "evaluations": 1, "seconds": 0.5}


def of_one_update(
    target: Target, data: ConversationData, folder: Path
) -> tuple[dict[str, Any], Path]:
    """A complete checkpoint, and where it is."""
    module, stream = module_for(data, target, max_steps=1)
    keep = keeper(folder)
    keep.facts = {"target": {}}
    fit(module, stream, keep)
    path = folder / "last.ckpt"
    state = read_checkpoint(path)
    check_complete(state, path)
    return state, path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def updates_in(path: Path) -> int:
    return int(read_checkpoint(path)["progress"]["updates"])


@pytest.mark.field("F48")
def test_best_is_by_tau_and_ties_take_the_later(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=6)
    decode = Scripted([None, 1.5, 2.0, 2.0, None, 1.9])
    keep = keeper(tmp_path, decode)
    fit(module, stream, decode, keep)
    assert (keep.best, keep.best_update) == (2.0, 4)
    assert updates_in(tmp_path / "best.ckpt") == 4 and updates_in(tmp_path / "last.ckpt") == 6
    assert names(tmp_path) == ["best.ckpt", "last.ckpt"]


@pytest.mark.field("F48", "F49")
def test_nothing_measured_is_never_best(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=3)
    decode = Scripted([None] * 3)
    keep = keeper(tmp_path, decode, patience=1)
    fit(module, stream, decode, keep)
    assert keep.best is None and module.updates == 3 and names(tmp_path) == ["last.ckpt"]


def test_patience_ends_the_run(target: Target, data: ConversationData, tmp_path: Path) -> None:
    module, stream = module_for(data, target, max_steps=20)
    decode = Scripted([2.0, 1.0, 3.0, 2.0, 2.9, 9.0])
    fit(module, stream, decode, keeper(tmp_path, decode, patience=2))
    assert module.stopped == "patience" and module.updates == 5
    assert updates_in(tmp_path / "best.ckpt") == 3 and updates_in(tmp_path / "last.ckpt") == 5


class Noisy(Scripted):
    """Tokens of each of eight prompts, in ten rounds each, at every evaluation."""

    def __init__(self, *tokens: list[int], every: int = 1) -> None:
        super().__init__([None] * len(tokens), every)
        self.tokens = tokens

    def measure(self, module: DraftModule, *, last: bool = False) -> dict[str, float | None]:
        tallies = [Tally(rounds=10, emitted=n) for n in self.tokens[self.evaluations]]
        found = super().measure(module, last=last)
        self.found = Evaluated(tallies, {}, None)
        return found


FIRST = [12, 30, 15, 22, 18, 27, 13, 16]
ALIKE = [13, 29, 15, 23, 17, 28, 13, 15]
"""Some prompts a little more, others less: the sum is the same."""
LESS = [n - 1 for n in FIRST]
"""A little less, but everywhere: prompts differ far more than this, and yet it is no noise."""
MORE = [n + 1 for n in FIRST]


@pytest.mark.parametrize(
    ("evaluations", "best", "progress"),
    [
        ((FIRST, ALIKE), 2, 1),  # within noise: the later one, and no progress
        ((FIRST, LESS), 1, 1),
        ((FIRST, MORE), 2, 0),
        ((FIRST, LESS, ALIKE), 3, 2),
        # A slow fall: each is within the noise of the one before it, but not of the first.
        ((FIRST, [11, *FIRST[1:]], [11, 29, *FIRST[2:]], LESS), 3, 3),
        # A slow rise: it is progress once it is beyond the noise of where it was last.
        ((FIRST, [13, *FIRST[1:]], [13, 31, *FIRST[2:]], MORE), 4, 0),
        # And also where no step is beyond the noise of the one before it.
        ((FIRST, [13, 31, *FIRST[2:]], [13, 31, 16, 23, *FIRST[4:]]), 3, 0),
    ],
)
def test_best_and_patience_look_beyond_noise(
    target: Target,
    data: ConversationData,
    tmp_path: Path,
    evaluations: tuple[list[int], ...],
    best: int,
    progress: int,
) -> None:
    module, stream = module_for(data, target, max_steps=len(evaluations))
    decode = Noisy(*evaluations)
    keep = keeper(tmp_path, decode)
    fit(module, stream, decode, keep)
    assert keep.best_update == updates_in(tmp_path / "best.ckpt") == best
    assert keep.best == pytest.approx(sum(evaluations[best - 1]) / 80)
    assert keep.without_progress == progress


def test_what_was_measured_otherwise_is_not_compared(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=2)
    decode = Noisy(FIRST, LESS)
    fit(module, stream, decode, keeper(tmp_path, decode))
    kept = read_checkpoint(tmp_path / "last.ckpt")["keeper"]
    for measures, best in ((kept["measures"], 2), ("other prompts", 3)):
        again = Noisy(LESS)
        keep = keeper(tmp_path, again)
        keep.load_state_dict({**kept, "measures": measures, "best_update": 2})
        again.measured_at, again.found = 3, Evaluated([Tally(rounds=10, emitted=5)] * 8, {}, None)
        assert keep._judge(again.found.counts) == (best == 3)


@pytest.mark.field("F20")
@pytest.mark.parametrize(("steps", "every"), [(10, 4), (3, 100), (4, 4)])
def test_last_is_the_true_last_step(
    target: Target, data: ConversationData, tmp_path: Path, steps: int, every: int
) -> None:
    module, stream = module_for(data, target, max_steps=steps)
    fit(module, stream, keeper(tmp_path, every=every))
    state = read_checkpoint(tmp_path / "last.ckpt")
    assert state["progress"]["updates"] == steps
    assert same(
        {n.removeprefix("drafter."): w for n, w in state["weights"].items()}, weights_of(module)
    )


@pytest.mark.field("F29")
def test_old_numbered_ones_are_removed(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=10)
    decode = Scripted([1.0, 9.0, *[1.0] * 8])
    fit(module, stream, decode, keeper(tmp_path, decode, every=1, keep=2))
    assert names(tmp_path) == [
        "best.ckpt",
        "last.ckpt",
        "update-00000009.ckpt",
        "update-00000010.ckpt",
    ]
    assert [updates_in(tmp_path / name) for name in names(tmp_path)] == [2, 10, 9, 10]
    inodes = {(tmp_path / name).stat().st_ino for name in names(tmp_path)}
    assert len(inodes) == 3  # the newest numbered one is last itself


@pytest.mark.field("F18", "F19", "F21")
def test_stopped_in_mid_epoch_and_resumed(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    """Rows, rates and weights of both parts together are those of a run that was not stopped."""
    settings: dict[str, Any] = {"accumulate": 2, "max_steps": 9, "batch_tokens": 320}
    intact, stream = module_for(data, target, **settings)
    watched = Watch()
    fit(intact, stream, watched)

    first, stream = module_for(data, target, **settings)
    one, decode = Watch(stop_at=4), Scripted([1.0, 2.0], every=2)
    fit(first, stream, one, decode, keeper(tmp_path, decode, every=100))
    assert first.stopped == "signal" and 4 <= first.updates < 9
    assert first.position % first.course.batches  # in mid-epoch

    second, stream = module_for(data, target, **settings)
    state = read_checkpoint(tmp_path / "last.ckpt")
    second.continue_from(state)
    stream.position = second.position
    decode = Scripted([1.0, 2.0, 1.5, 1.0, 1.0, 1.0], every=2)
    decode.load_state_dict(state["decode"])
    keep = keeper(tmp_path, decode)
    keep.load_state_dict(state["keeper"])
    two = Watch()
    fit(second, stream, two, decode, keep)
    assert one.rows + two.rows == watched.rows
    assert one.rates + two.rates == watched.rates
    assert same(weights_of(second), weights_of(intact)) and second.supervised == intact.supervised
    assert (keep.best, keep.best_update) == (2.0, 4) and updates_in(tmp_path / "best.ckpt") == 4


class Killed(Exception):
    """What a program that was not given the time to stop does not see."""


class KilledWhileMeasuring(Scripted):
    """A TERM signal comes while the measurement of an update is made, and the end before it is
    done."""

    def __init__(self, taus: list[float | None], every: int, at: int) -> None:
        super().__init__(taus, every)
        self.at = at

    def measure(self, module: DraftModule, *, last: bool = False) -> dict[str, float | None]:
        if module.updates == self.at:
            signal.raise_signal(signal.SIGTERM)
            raise Killed
        return super().measure(module, last=last)


class KilledWithinAWindow(Callback):
    """A TERM signal comes after a micro-batch that ends no window, and the end before the next
    one."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.updates >= 5 and pl_module.position > pl_module.closed:
            signal.raise_signal(signal.SIGTERM)
            raise Killed


@pytest.mark.field("F18")
@pytest.mark.parametrize("where", ["in an evaluation", "in a window"])
def test_a_signal_writes_a_checkpoint_at_once(
    target: Target, data: ConversationData, tmp_path: Path, where: str
) -> None:
    """However long an update or an evaluation takes; what was not done is done by the resumed run,
    and nothing differs."""
    settings: dict[str, Any] = {"accumulate": 2, "max_steps": 9, "batch_tokens": 320}
    taus: list[float | None] = [1.0, 3.0, 2.0, 2.5, 2.75]
    intact, stream = module_for(data, target, **settings)
    watched, noted = Watch(), Scripted(taus, every=2)
    calm = keeper(tmp_path / "calm", noted, every=3)
    fit(intact, stream, watched, noted, calm)

    first, stream = module_for(data, target, **settings)
    one, folder, before = Watch(), tmp_path / "run", signal.getsignal(signal.SIGTERM)
    measuring = where == "in an evaluation"
    decode = KilledWhileMeasuring(taus, 2, at=4) if measuring else Scripted(taus, every=2)
    others = [] if measuring else [KilledWithinAWindow()]
    with pytest.raises(Killed):
        fit(first, stream, one, *others, decode, keeper(folder, decode, every=100))
    assert signal.getsignal(signal.SIGTERM) is before
    state = read_checkpoint(folder / "last.ckpt")
    assert (
        state["progress"]["updates"] == first.updates >= 4
        and state["progress"]["position"] == first.closed
    )
    assert state["decode"]["measured_at"] == first.updates // 2 * 2 - (2 if measuring else 0)

    second, stream = module_for(data, target, **settings)
    second.continue_from(state)
    stream.position = second.position
    decode, two = Scripted(taus, every=2), Watch()
    decode.load_state_dict(state["decode"])
    keep = keeper(folder, decode, every=3)
    keep.load_state_dict(state["keeper"])
    fit(second, stream, two, decode, keep)
    assert one.rows[: state["progress"]["position"]] + two.rows == watched.rows
    assert keep.state_dict() == calm.state_dict()
    assert (keep.best, keep.best_update, keep.without_progress) == (3.0, 4, 3)
    assert decode.evaluations == noted.evaluations == 5
    for name in ("best.ckpt", "last.ckpt"):
        ours, theirs = (read_checkpoint(path / name) for path in (folder, tmp_path / "calm"))
        assert (
            same(ours["weights"], theirs["weights"])
            and ours["progress"]["updates"] == theirs["progress"]["updates"]
        )


def test_a_signal_within_the_last_update_leaves_the_run_its_end(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=3)
    decode = Scripted([1.5], every=50)
    fit(module, stream, Watch(stop_at=2), decode, keeper(tmp_path, decode, every=1))
    assert module.stop_requested and module.stopped is None and decode.measured_at == 3
    state = read_checkpoint(tmp_path / "last.ckpt")
    assert state["progress"]["updates"] == 3 and state["keeper"]["best_update"] == 3


def test_processes_that_share_the_weights_only_write_together(
    target: Target, data: ConversationData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds a part of the state cannot write it by itself, wherever a signal finds
    it."""
    monkeypatch.setattr("drafttrain.training.keeper.SingleDeviceStrategy", Killed)
    module, stream = module_for(data, target, accumulate=2, max_steps=9, batch_tokens=320)
    with pytest.raises(Killed):
        fit(module, stream, KilledWithinAWindow(), keeper(tmp_path, every=100))
    assert module.stop_requested and not list(tmp_path.iterdir())


@pytest.mark.field("F21")
def test_other_micro_batches_are_another_run() -> None:
    """Batches and noise are drawn for their number in an update: with another the same updates
    would not follow."""
    facts = {"target": {"weights": "a"}, "accumulate x processes": 1, "seed": 0}
    settings = {"seed": 0, "trainer": {"log_every": 2}}
    noted, here = list[str](), Path()
    state = {"facts": facts, "settings": settings}
    refuse_other_run(state, facts, {**settings, "trainer": {"log_every": 3}}, noted.append, here)
    assert noted == [
        "settings differ from the earlier part of this run: trainer.log_every was 2, is 3"
    ]
    with pytest.raises(InputError, match=said("training.another_run")):
        refuse_other_run(
            state, {**facts, "accumulate x processes": 2}, settings, noted.append, here
        )


@pytest.mark.field("F21")
def test_two_processes_go_on_where_one_stood(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same place, with the same noise for each micro-batch, and as the same run."""

    def facts(world: int, accumulate: int, start: str | None = None) -> dict[str, Any]:
        trainer = {
            "batch_tokens": 320,
            "batch_rows": None,
            "pack": None,
            "precision": "32-true",
            "accumulate": accumulate,
        }
        config = {
            "trainer": trainer,
            "data": {},
            "optim": {},
            "drafter": {},
            "draft_vocab": 0,
            "seed": 0,
            "init_from": start,
        }
        return facts_of(config, target, data, single, world, {})

    single, stream = module_for(data, target, accumulate=4, max_steps=3, batch_tokens=320)
    started = facts(1, 4, "package")["weights of init_from"]
    fit(single, stream)
    assert started != facts(1, 4, "package")["weights of init_from"]
    assert facts(1, 4)["weights of init_from"] is None
    state = {"weights": single.state_dict(), "progress": single.progress(), "optimiser": None}
    noise = []
    for position in range(12, 16):
        single.position = position
        noise.append(single._noise_seed())
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared, _ = module_for(data, target, accumulate=2, max_steps=3, batch_tokens=320)
    shared.continue_from(state)
    assert shared.position == shared.closed == 6 and shared.updates == 3
    assert shared.progress() == single.progress() | {"position": 12, "seconds": shared.seconds}
    found = []
    for shared.position in (6, 7):
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            found.append(shared._noise_seed())
    assert found == noise and len(set(noise)) == 4
    assert facts(1, 4) == facts(2, 2) == facts(4, 1) != facts(2, 4)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(path, {"progress": {"updates": 1}})

    def full(*args: Any, **kwargs: Any) -> None:
        args[1].write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, {"progress": {"updates": 2}})
    assert updates_in(path) == 1 and names(tmp_path) == ["last.ckpt"]


def test_a_limit_of_file_sizes_leaves_the_old_one(tmp_path: Path) -> None:
    """Wherever the limit falls, also in what is written only while the file is closed."""
    path, intact = tmp_path / "last.ckpt", tmp_path / "intact.ckpt"
    write_checkpoint(path, {"progress": {"updates": 1}})
    state = {"progress": {"updates": 2}, "weights": {"a": torch.zeros(5000), "b": torch.ones(30)}}
    write_checkpoint(intact, state)
    size = intact.stat().st_size
    for limit in (0, 1, 100, 1000, size // 2, size - 4000, size - 100, size - 1):
        with file_limit(limit), pytest.raises(OSError) as caught:
            write_checkpoint(path, state)
        said = disk_full(caught.value)
        assert (
            said.startswith("a file grew larger than this system allows")
            and f"while writing {path}: raise" in said
        ), limit
        assert updates_in(path) == 1 and names(tmp_path) == ["intact.ckpt", "last.ckpt"]
    with file_limit(size):
        write_checkpoint(path, state)
    assert updates_in(path) == 2


def test_what_a_run_cannot_go_on_from_is_refused(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    intact, path = of_one_update(target, data, tmp_path)
    check_complete(
        {
            **intact,
            "decode": MEASURED,
            "keeper": {"best": 1.5, "best_update": 1, "without_progress": 0},
        },
        path,
    )
    for change, fault in (
        (lambda state: state.pop("facts"), "lacks facts: target"),
        (lambda state: state.update(facts=3), "lacks facts: target"),
        (lambda state: state.update(settings=None), "lacks settings"),
        (lambda state: state.pop("decode"), "lacks decode: measured_at"),
        (lambda state: state.update(weights=[1]), "lacks weights"),
        (lambda state: state["weights"].update(odd=3), said("training.odd_weights")),
        (lambda state: state["weights"].update({3: torch.ones(2)}), said("training.odd_weights")),
        (lambda state: state["progress"].pop("position"), "lacks progress: position"),
        (lambda state: state["progress"].update(updates="many"), said("training.odd_progress")),
        (lambda state: state["progress"].update(position=-1), said("training.odd_progress")),
        (lambda state: state["progress"].update(updates=2), said("training.odd_progress")),
        (lambda state: state["progress"].update(position=10**15), said("training.odd_progress")),
        (
            lambda state: state["keeper"].clear(),
            "lacks keeper: best, best_update, without_progress",
        ),
        (
            lambda state: state["keeper"].update(best="much", best_update=1),
            said("training.odd_best"),
        ),
        (
            lambda state: state["keeper"].update(best=[2.0], best_update=1),
            said("training.odd_best"),
        ),
        (
            lambda state: state["keeper"].update(best=math.nan, best_update=1),
            said("training.odd_best"),
        ),
        (lambda state: state["keeper"].update(best=2.0), said("training.odd_best")),
        (
            lambda state: state["keeper"].update(best=2.0, best_update="../../other"),
            said("training.odd_best"),
        ),
        (lambda state: state["keeper"].update(best=2.0, best_update=2), said("training.odd_best")),
        (lambda state: state["keeper"].update(without_progress=-1), said("training.odd_best")),
        (
            lambda state: state.update(decode={**MEASURED, "evaluations": None}),
            said("training.odd_measurement"),
        ),
        (
            lambda state: state.update(decode={**MEASURED, "measured_at": "x"}),
            said("training.odd_measurement"),
        ),
        (
            lambda state: state.update(decode={**MEASURED, "evaluations": "much"}),
            said("training.odd_measurement"),
        ),
        (
            lambda state: state.update(decode={**MEASURED, "seconds": math.inf}),
            said("training.odd_measurement"),
        ),
        (lambda state: state["progress"].update(seconds=math.nan), said("training.odd_progress")),
    ):
        state = copy.deepcopy(intact)
        change(state)
        with pytest.raises(InputError, match=fault):
            check_complete(state, path)


NO_CLIP: dict[str, Any] = {"clip_norm": None}


# The kind: numbers that are no longer finite must change and enter nothing that is kept.
# Neighbours: NaN, infinity, and finite entries whose squares overflow, which clipping may save;
# with each way of clipping, of which clip_value hides infinity; of one process only; once and in a
# row; weights and moments that an update with a finite gradient spoils; files of earlier versions
# that hold such values.
@pytest.mark.field("F72")
@pytest.mark.parametrize(
    ("value", "clip"),
    [
        *itertools.product((math.nan, math.inf), (NO_CLIP, {}, {**NO_CLIP, "clip_value": 1.0})),
        (1e30, NO_CLIP),
        (1e30, {"clip_norm": 1e25}),
        (1e30, {"clip_norm": None, "clip_value": 1e25}),
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing_and_ends_the_run_in_time(
    target: Target, data: ConversationData, tmp_path: Path, value: float, clip: dict[str, Any]
) -> None:
    module, stream = module_for(data, target, optim=clip, max_steps=20)
    first = next(module.drafter.parameters())
    windows = {1, 3, 4, 5}  # One by itself, and three in a row.
    first.register_hook(lambda g: g * (value / g.abs().max() if module.position in windows else 1))
    name = "training.large_gradient" if value == 1e30 else "training.spoilt_gradient"
    with pytest.raises(InputError, match=said(name)) as caught:
        fit(module, stream, keeper(tmp_path, every=1))
    path = tmp_path / "last.ckpt"
    assert f"the last good checkpoint is {path} of update 2" in str(caught.value)
    state = read_checkpoint(path)
    check_complete({**state, "facts": {"target": {}}}, path)
    kept = {name.removeprefix("drafter."): weight for name, weight in state["weights"].items()}
    assert (module.updates, module.spoilt_windows) == (2, 4) and same(kept, weights_of(module))
    again, stream = module_for(data, target, optim=clip, max_steps=20)
    again.continue_from(state)
    stream.position = again.position
    fit(again, stream)
    assert again.spoilt_windows == 1 and again.updates == 19


@pytest.mark.field("F72")
@pytest.mark.parametrize("value", [1e25, 3e38])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": None, "clip_value": 0.1}, {"clip_value": 2e38}])
def test_a_finite_gradient_whose_norm_overflows_is_clipped(
    target: Target, data: ConversationData, value: float, clip: dict[str, Any]
) -> None:
    """Of a gradient that is scaled up the clipped one is the same."""

    def run(value: float) -> tuple[DraftModule, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module, stream = module_for(data, target, optim=clip, max_steps=3)
        first = next(module.drafter.parameters())
        first.register_hook(lambda g: g.sign() * value)
        fit(module, stream)
        return module, weights_of(module)

    (module, large), (_, small) = run(value), run(1e12)
    assert (module.updates, module.spoilt_windows) == (3, 0)
    for name, weight in large.items():
        torch.testing.assert_close(weight, small[name], rtol=1e-5, atol=1e-7)


@pytest.mark.field("F72")
def test_what_another_process_found_counts_as_well(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, stream = module_for(data, target, max_steps=4)
    before, inner = weights_of(module), over_processes
    monkeypatch.setattr(
        "drafttrain.training.module.over_processes",
        lambda values: inner(values) + (not values.dim()),  # Flags have no dimension.
    )
    with pytest.raises(InputError, match=said("training.spoilt_gradient")):
        fit(module, stream)
    assert same(before, weights_of(module)) and not module.updates


class Spoils(Callback):
    """What an update left is no longer finite."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at = what, at

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.updates == self.at:
            weight = next(pl_module.drafter.parameters())
            moments = trainer.optimizers[0].state[weight]
            (weight.data if self.what == "weights" else moments[self.what]).view(-1)[0] = math.inf


@pytest.mark.field("F72")
@pytest.mark.parametrize("what", ["weights", "exp_avg", "exp_avg_sq"])
def test_no_checkpoint_holds_what_is_not_finite(
    target: Target, data: ConversationData, tmp_path: Path, what: str
) -> None:
    module, stream = module_for(data, target, max_steps=4)
    with pytest.raises(InputError, match=said("training.spoilt_checkpoint")) as caught:
        fit(module, stream, Spoils(what, at=4), keeper(tmp_path, every=2))
    assert updates_in(tmp_path / "last.ckpt") == 2 and names(tmp_path) == ["last.ckpt"]
    assert f"{tmp_path / 'last.ckpt'} of update 2" in str(caught.value)


@pytest.mark.field("F72")
def test_a_checkpoint_that_holds_what_is_not_finite_is_refused(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    state, path = of_one_update(target, data, tmp_path)
    weights = [weight for weight in state["weights"].values() if weight.is_floating_point()]
    weights[-1].view(-1)[-1] = math.nan
    state["optimiser"]["state"][1]["exp_avg_sq"].view(-1)[0] = math.inf
    with pytest.raises(InputError, match=said("training.spoilt_file")):
        check_complete(state, path)


# The kind: a part of the optimiser's state that is not there is taken as fresh, or breaks a library
# later. Neighbours: no state at all, of one weight, one moment of one weight, no number of steps,
# things that are no tensors, a number of steps that the run never made, no groups.
@pytest.mark.field("F85")
def test_moments_that_are_lacking_are_named(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    intact, path = of_one_update(target, data, tmp_path)
    count = len(intact["optimiser"]["state"])
    lacks = r"lacks moments of the optimiser \({}"
    for change, fault in (
        (lambda held: held.clear(), lacks.format("step of weight 0, exp_avg of weight 0, ")),
        (lambda held: held.pop(1), lacks.format("step of weight 1, exp_avg of weight 1, ")),
        (lambda held: held[2].pop("exp_avg_sq"), lacks.format(r"exp_avg_sq of weight 2\)")),
        (lambda held: held[count - 1].pop("step"), lacks.format(f"step of weight {count - 1}")),
        (lambda held: held[0].update(exp_avg=None), lacks.format(r"exp_avg of weight 0\)")),
        (lambda held: held.update({0: 3}), lacks.format("step of weight 0, exp_avg of weight 0")),
        (lambda held: held[0]["step"].fill_(0), said("training.odd_step")),
        (lambda held: held[0]["step"].fill_(2), said("training.odd_step")),
        (lambda held: held[0].update(step=torch.ones(2)), said("training.odd_step")),
    ):
        state = copy.deepcopy(intact)
        change(state["optimiser"]["state"])
        with pytest.raises(InputError, match=fault):
            check_complete(state, path)
    for groups in (None, [3], [{}]):
        state = copy.deepcopy(intact)
        state["optimiser"]["param_groups"] = groups
        with pytest.raises(InputError, match="lacks optimiser: state, param_groups"):
            check_complete(state, path)
    untrained = copy.deepcopy(intact)
    untrained["progress"].update(updates=0)
    untrained["optimiser"]["state"].clear()
    check_complete(untrained, path)


def repacked(
    path: Path, change: Callable[[dict[str, bytes]], Any], how: int = zipfile.ZIP_STORED
) -> None:
    """The archive written again from its changed parts."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def laughs() -> list[Any]:
    """Thirty lists that unfold to 10^30 entries."""
    inner: list[Any] = [0]
    for _ in range(30):
        inner = [inner] * 10
    return inner


def around_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"format": laughs()}, said("training.not_plain")),
        ({"format": 1, "facts": {"target": laughs()}}, said("training.not_plain")),
        ({"format": 1, "facts": around_itself()}, said("training.not_plain")),
        ({"format": 1 << 1000}, said("training.not_plain")),
        ({"format": 1, "weights": torch.float32}, said("training.not_plain")),
        ({"format": torch.ones(3)}, said("training.other_format")),
    ],
    ids=["format", "facts", "itself", "number", "dtype", "tensor"],
)
def test_what_refers_to_itself_or_is_huge_is_refused_in_a_moment(
    tmp_path: Path, state: dict[str, Any], fault: str
) -> None:
    torch.save(state, tmp_path / "a.ckpt")
    began = time.monotonic()
    with pytest.raises(InputError, match=fault):
        read_checkpoint(tmp_path / "a.ckpt")
    assert time.monotonic() - began < 5


def test_a_packed_archive_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, {"x": torch.zeros(100_000)})
    repacked(path, lambda parts: None)
    assert read_checkpoint(path)["x"].shape == (100_000,)
    repacked(path, lambda parts: None, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match=said("training.damaged_archive")):
        read_checkpoint(path)


def test_a_single_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, {"x": torch.full((1000,), 7.0)})
    intact = path.read_bytes()
    at = intact.index(torch.full((1000,), 7.0).numpy().tobytes()) + 1001
    path.write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
    with pytest.raises(InputError, match=said("training.damaged_archive")):
        read_checkpoint(path)


def test_how_moments_are_used_is_what_the_settings_say(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    """Not what a checkpoint says: its settings are compared elsewhere."""
    module, stream = module_for(data, target, max_steps=1)
    fit(module, stream, keeper(tmp_path / "intact"))
    state = read_checkpoint(tmp_path / "intact" / "last.ckpt")
    found = []
    for change in (
        {},
        {
            "betas": "x",
            "amsgrad": True,
            "maximize": True,
            "weight_decay": 50.0,
            "eps": 1e9,
            "lr": 9.0,
        },
    ):
        edited = copy.deepcopy(state)
        edited["optimiser"]["param_groups"][0].update(change)
        again, stream = module_for(data, target, max_steps=3)
        again.continue_from(edited)
        stream.position = again.position
        fit(again, stream)
        found.append(weights_of(again))
    assert same(*found)


# The kind: numbers that are all in order, and not those that were written. A file that the same
# program reads and writes again has right checksums.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "weights": (lambda s: next(iter(s["weights"].values())).add_(1), "weights"),
    "ids": (lambda s: s["weights"].update({k: v * 2 for k, v in s["weights"].items()}), "weights"),
    "moments": (lambda s: s["optimiser"]["state"][0]["exp_avg_sq"].zero_(), "moments"),
    "steps": (lambda s: s["optimiser"]["state"][0]["step"].fill_(1), "moments"),
    "position": (lambda s: s["progress"].update(position=9), "numbers"),
    "best": (lambda s: s["keeper"].update(best=9.0, best_update=1), "numbers"),
    "clock": (lambda s: s["progress"].update(seconds=1e9), "numbers"),
    "seed": (lambda s: s["facts"].update(seed=8), "numbers"),
    "sums": (lambda s: s.update(sums=3), "weights, moments, numbers"),
}


@pytest.mark.field("F85")
@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_was_changed_outside_is_refused(
    name: str, target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=2)
    keep = keeper(tmp_path)
    keep.facts = {"target": {}, "seed": 1}
    fit(module, stream, keep)
    path, (change, part) = tmp_path / "last.ckpt", CHANGES[name]
    check_complete(read_checkpoint(path), path)
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    with pytest.raises(InputError, match=rf"was changed since it was written \({part}\): give"):
        read_checkpoint(path)
    state.pop("sums")  # As an earlier version wrote it.
    torch.save(state, path)
    check_complete(read_checkpoint(path), path)


# The kind: a checkpoint that another program wrote smaller, or larger; its numbers are rounded, and
# the run goes on with them as if they were its own.
@pytest.mark.field("F85")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq"])
def test_numbers_in_another_dtype_are_refused(
    part: str, dtype: torch.dtype, target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=1)
    fit(module, stream, keeper(tmp_path))
    state = read_checkpoint(tmp_path / "last.ckpt")
    held = state["weights"] if part == "weights" else state["optimiser"]["state"][1]
    name = part if part != "weights" else list(held)[-1]
    held[name] = held[name].to(dtype)
    word = str(dtype).removeprefix("torch.")
    again, stream = module_for(data, target, max_steps=3)
    with pytest.raises(InputError, match=rf"has {name}.* in {word}, a run keeps it in float32"):
        again.continue_from(state)
        stream.position = again.position
        fit(again, stream)


def test_moments_of_other_weights_are_refused(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=1)
    fit(module, stream, keeper(tmp_path))
    intact = read_checkpoint(tmp_path / "last.ckpt")
    moments = intact["optimiser"]["state"]
    for change, fault in (
        (lambda: moments[0].update(exp_avg=torch.zeros(3)), said("training.other_moments")),
        (lambda: intact["optimiser"].pop("param_groups"), said("training.other_optimiser")),
    ):
        change()
        again, stream = module_for(data, target, max_steps=3)
        again.continue_from(copy.deepcopy(intact))
        stream.position = again.position
        with pytest.raises(InputError, match=fault):
            fit(again, stream)


@pytest.mark.field("F67")
def test_files_are_read_without_running_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    torch.save({"format": 1, "x": Evil()}, tmp_path / "evil.ckpt")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 not a checkpoint")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    torch.save({"format": True}, tmp_path / "true.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    write_checkpoint(tmp_path / "intact.ckpt", {"x": torch.zeros(1000)})
    for share in (1, 2, 3):
        (tmp_path / f"short{share}.ckpt").write_bytes(
            (tmp_path / "intact.ckpt").read_bytes()[: -1000 * share]
        )
    # Opcodes that a pickle machine stumbles over in many ways: what it raises is the library's own.
    odd = (
        b"",
        b"\x80\x02.",
        b"\x80\x02h\x07.",
        b"\x80\x02}(K\x01.",
        b"\x80\x02\x85.",
        b"(dp0\n.",
        b"\x80\x02cos\nx\n.",
    )
    for place, data in enumerate(odd):
        (tmp_path / f"pickle{place}.ckpt").write_bytes(data)
    (tmp_path / "folder.ckpt").mkdir()
    unread = (
        "evil",
        "cut",
        "short1",
        "short2",
        "short3",
        "folder",
        *(f"pickle{place}" for place in range(7)),
    )
    for name, message in (
        *((name, said("training.unreadable")) for name in unread),
        *((name, said("training.other_format")) for name in ("foreign", "true", "list")),
        ("no", said("training.no_checkpoint")),
    ):
        with pytest.raises(InputError, match=message):
            read_checkpoint(tmp_path / f"{name}.ckpt")
