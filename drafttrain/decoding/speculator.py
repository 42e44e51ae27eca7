"""The runtime: a target, a drafter's decoding copy and a plan. Training, packages and doors all
decode through this."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.loop import Ends, Listener, Output, decode
from drafttrain.decoding.measure import Measurement, Prompts, measure_acceptance, measure_speed
from drafttrain.decoding.plan import Plan, check_dtype
from drafttrain.decoding.replaying import Replays, obstacle
from drafttrain.drafter.base import Drafter
from drafttrain.flow import Tally
from drafttrain.nn.sampling import fresh_seed
from drafttrain.target.load import forced_dtype
from drafttrain.target.model import Target


class Speculator:
    """Decodes with drafts; the text keeps the guarantee of its plan.

    Args:
        dtype: the drafter's while decoding. `auto` on a CPU measures which of float32 and bfloat16
            drafts faster here; on an accelerator it is the target's. Exactness does not depend on
            it: the distribution that a draft was drawn from is the one handed to the rule.
    """

    def __init__(
        self, target: Target, drafter: Drafter, plan: Plan, *, dtype: str = "auto"
    ) -> None:
        drafter.check(plan.tree)
        self.target, self.plan = target, plan.made_by(drafter)
        check_dtype(dtype)
        self.replays: Replays | None = None
        """The target's answers, on which acceptance is counted where they can stand in for it."""
        self.drafter = (
            _fastest(drafter, target) if dtype == "auto" else drafter.at(getattr(torch, dtype))
        )

    def refresh(self, drafter: Drafter) -> None:
        """Copy a live drafter's weights into the decoding copy."""
        own = dict(self.drafter.named_parameters())
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                own[name].copy_(parameter)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        plan: Plan | None = None,
        seed: int | None = None,
        stop_ids: Sequence[int] | None = None,
        listener: Listener | None = None,
        ends: Ends | None = None,
    ) -> tuple[list[Output], Tally]:
        """Decode a batch; see `drafttrain.decoding.loop.decode`.

        Args:
            seed: gives the same texts again; None draws others in every call.
        """
        plan = plan or self.plan
        if seed is None:
            seed = 0 if plan.policy.greedy else fresh_seed()
        return decode(
            self.target,
            self.drafter if plan.tree.size else None,
            prompts,
            plan,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop_ids=stop_ids,
            listener=listener,
            ends=ends,
        )

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        plan: Plan | None = None,
        seed: int | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[int], int]]:
        """Yield (new ids, how many of the first of them were accepted drafts) after every target
        pass. Arguments as for `generate`."""
        passes: queue.Queue[tuple[list[int], int] | BaseException | None] = queue.Queue()
        stopped = threading.Event()

        class _Left(Exception):
            pass

        def listen(_row: int, ids: list[int], accepted: int) -> None:
            if stopped.is_set():
                raise _Left
            passes.put((ids, accepted))

        def work() -> None:
            try:
                self.generate(
                    [prompt],
                    max_new_tokens=max_new_tokens,
                    plan=plan,
                    seed=seed,
                    stop_ids=stop_ids,
                    listener=listen,
                )
                passes.put(None)
            except _Left:
                pass
            except BaseException as error:
                passes.put(error)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            while (item := passes.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            worker.join()

    def replays_plan(self, plan: Plan | None = None) -> bool:
        """Is the plan's acceptance counted on the target's answers?"""
        plan = plan or self.plan
        known = self.replays is not None and plan.tree.size > 0
        return known and obstacle(self.drafter, plan) is None

    def stand_in(self, plan: Plan) -> Target:
        """What the plan's acceptance is counted on: the target, or its answers."""
        if self.replays is None or not self.replays_plan(plan):
            return self.target
        return self.replays.of(self.drafter.needs)

    def measure_acceptance(
        self, prompts: Prompts, plan: Plan | None = None, *, decoding: bool = False, **settings: Any
    ) -> Measurement:
        """See `drafttrain.decoding.measure.measure_acceptance`; without a plan its own is
        measured, on the target's answers where that can be.

        Args:
            decoding: really decode.
        """
        plan = plan or self.plan
        if self.replays is not None and not decoding and self.replays_plan(plan):
            settings.pop("seed", None)
            return self.replays.measure(self.drafter, prompts, plan, **settings)
        return measure_acceptance(
            self.target, self.drafter if plan.tree.size else None, prompts, plan, **settings
        )

    def measure_speed(
        self, prompts: Prompts, plans: Sequence[Plan], **settings: Any
    ) -> list[Measurement]:
        """See `drafttrain.decoding.measure.measure_speed`."""
        return measure_speed(self.target, self.drafter, prompts, plans, **settings)


def _fastest(drafter: Drafter, target: Target) -> Drafter:
    """The decoding copy in the dtype that drafts fastest here, or that the environment names."""
    if forced := forced_dtype():
        return drafter.at(forced)
    if target.device.type != "cpu":
        return drafter.at(target.dtype)
    copies = [drafter.at(dtype) for dtype in (torch.float32, torch.bfloat16)]
    return min(copies, key=_draft_seconds)


@torch.inference_mode()
def _draft_seconds(drafter: Drafter) -> float:
    """Seconds of streaming the drafter's matrices through small products, as drafting a chain or a
    narrow tree does."""
    matrices: list[Tensor] = [p for p in drafter.parameters() if p.dim() == 2]
    head: Tensor | None = getattr(drafter, "head_rows", None)
    matrices += [head] if head is not None else []
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for matrix in matrices:
            for positions in (1, 4):
                torch.nn.functional.linear(
                    torch.ones(positions, matrix.shape[1], dtype=matrix.dtype), matrix
                )
        best = min(best, time.perf_counter() - start)
    return best
