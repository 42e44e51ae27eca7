"""How rows become batches, batches become updates, and when a run ends. Everything is a function of
one count of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafttrain.checks import integer, number, shown
from drafttrain.errors import InputError
from drafttrain.flow import Batch

if TYPE_CHECKING:
    from drafttrain.data.datamodule import ConversationData, EpochSampler

PRECISIONS = ("32-true", "bf16-mixed")
DDP, FSDP = "ddp", "fsdp"
_LONGEST = 1 << 17
"""Tokens of joined rows: what each may attend to is a table of that many times that many."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Batches, length, precision and place of a run."""

    accelerator: str
    """Where the drafter trains: auto (where the target is), cpu, gpu, mps."""
    precision: str
    """32-true, or bf16-mixed: products in bfloat16. Weights and their updates are float32 either
    way, since a bfloat16 weight rounds small updates away."""
    batch_tokens: int | None
    """Tokens of an update, padding counted, over all processes and accumulated micro-batches: how a
    batch is split does not change the recipe, as long as each micro-batch's share holds the longest
    row. A smaller share is raised to that."""
    batch_rows: int | None
    """Rows of an update, likewise. At least one of the two limits is needed."""
    pack: int | None
    """Tokens of a sequence that rows are joined into, each kept apart from the others in it; None
    joins none. A micro-batch then has full sequences, as many as its share of batch_tokens holds,
    at least one."""
    accumulate: int
    """Micro-batches of an update on each process: raise it where memory ends."""
    max_epochs: int | None
    max_steps: int | None
    """Updates; the first limit reached ends the run."""
    max_minutes: float | None
    """Wall clock of training, evaluation included, earlier parts of a resumed run included. The
    rate's schedule counts updates and does not know the clock, so that a run which the clock ends
    has not reached the schedule's end; with optim.horizon=clock it has."""
    log_every: int
    """Updates of a logged window; what is logged is the mean over its supervised tokens."""
    strategy: str
    """How several processes share the work: ddp, each has all weights; fsdp, each keeps its share
    of the drafter's weights, gradients and moments, and has all of the target."""

    def __post_init__(self) -> None:
        if self.strategy not in (DDP, FSDP):
            raise InputError(f"trainer.strategy={shown(self.strategy)}: give {DDP} or {FSDP}")
        if self.precision not in PRECISIONS:
            raise InputError(
                f"trainer.precision={self.precision}: give one of {', '.join(PRECISIONS)}"
            )
        if self.max_epochs is None and self.max_steps is None and self.max_minutes is None:
            raise InputError(
                "nothing ends the run: give trainer.max_epochs, trainer.max_steps or "
                "trainer.max_minutes"
            )
        for name in (
            "batch_tokens",
            "batch_rows",
            "max_epochs",
            "max_steps",
            "accumulate",
            "log_every",
        ):
            null = "" if name in ("accumulate", "log_every") else "no limit"
            integer(f"trainer.{name}", getattr(self, name), 1, null=null)
        integer("trainer.pack", self.pack, 2, _LONGEST, null="rows that are not joined")
        if self.pack is not None and (self.batch_tokens is None or self.batch_rows is not None):
            raise InputError(
                f"trainer.pack={self.pack}: updates of joined rows are counted in tokens, give "
                "trainer.batch_tokens and set trainer.batch_rows=null"
            )
        number("trainer.max_minutes", self.max_minutes, above=0, null="no limit")

    def sampler(self, data: ConversationData, *, seed: int, rank: int, world: int) -> EpochSampler:
        """This process's micro-batches. Raises InputError if an update would not hold the longest
        row."""
        from drafttrain.data.datamodule import EpochSampler
        from drafttrain.data.sequences import PackedSampler

        parts = self.accumulate * world
        if self.batch_rows is not None and self.batch_rows % parts:
            raise InputError(
                f"trainer.batch_rows={self.batch_rows} does not divide by accumulate x processes = "
                f"{self.accumulate} x {world}"
            )
        longest = max(data.lengths)
        if self.batch_tokens is not None and self.batch_tokens < longest:
            raise InputError(
                f"trainer.batch_tokens={self.batch_tokens} is less than the longest row, which has "
                f"{longest} tokens: raise it, or lower data.max_length"
            )
        common: dict[str, int] = {
            "seed": seed,
            "rank": rank,
            "world": world,
            "accumulate": self.accumulate,
        }
        if self.pack is not None:
            assert self.batch_tokens is not None
            lengths = data.joined(self.pack).lengths
            sequences = max(1, self.batch_tokens // parts // self.pack)
            return PackedSampler(lengths, sequence=self.pack, sequences=sequences, **common)
        # A row is never split: where a process's share is smaller than one, it takes one row.
        tokens = None if self.batch_tokens is None else max(self.batch_tokens // parts, longest)
        rows = None if self.batch_rows is None else self.batch_rows // parts
        return EpochSampler(data.lengths, batch_tokens=tokens, batch_rows=rows, **common)

    def course(self, sampler: EpochSampler) -> Course:
        return Course(
            batches=len(sampler),
            accumulate=self.accumulate,
            epochs=self.max_epochs,
            steps=self.max_steps,
            seconds=None if self.max_minutes is None else 60 * self.max_minutes,
        )


@dataclass(frozen=True)
class Course:
    """The place of a run after a number of micro-batches. Windows of accumulation do not cross
    epochs: an epoch's last is shorter."""

    batches: int
    """Micro-batches of one process in one epoch."""
    accumulate: int = 1
    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def updates_per_epoch(self) -> int:
        return -(-self.batches // self.accumulate)

    @property
    def updates(self) -> int | None:
        """Updates of the complete run; None if only the clock ends it."""
        limits = [self.steps] if self.steps is not None else []
        if self.epochs is not None:
            limits.append(self.epochs * self.updates_per_epoch)
        return min(limits) if limits else None

    @property
    def length(self) -> int | None:
        """Micro-batches of the complete run; None if only the clock ends it."""
        updates = self.updates
        if updates is None:
            return None
        epochs, rest = divmod(updates, self.updates_per_epoch)
        return epochs * self.batches + min(rest * self.accumulate, self.batches)

    def closes(self, position: int) -> bool:
        """Does the micro-batch with this number, from 0, end a window?"""
        k = position % self.batches
        return (k + 1) % self.accumulate == 0 or k + 1 == self.batches

    def epoch(self, position: int) -> float:
        return position / self.batches


class Stream:
    """The run's micro-batches from a position on, as the trainer reads them."""

    def __init__(self, data: ConversationData, sampler: EpochSampler, course: Course) -> None:
        self.data, self.sampler, self.course = data, sampler, course
        self.position = 0
        """Where the next iteration starts."""
        self.ended = False
        """Is nothing left to train on, wherever that is?"""

    def __len__(self) -> int:
        if self.course.length is None:
            raise TypeError("the length of a run that only the clock ends is not known")
        return self.course.length

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.position, self.course.batches)
        end = self.course.length
        for place, (_, _, rows) in enumerate(
            self.sampler.from_step(epoch, first), start=self.position
        ):
            if self.ended or (end is not None and place >= end):
                return
            yield self.data.batch(rows)
