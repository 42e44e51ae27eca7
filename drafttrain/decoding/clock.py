"""Seconds of decoding, by stage."""

from __future__ import annotations

import time

import torch

STAGES = ("prefill", "draft", "verify", "host")
"""In their order."""


class Clock:
    """Seconds by stage; an accelerator is waited for, so that a stage holds its own work."""

    def __init__(self, device: torch.device) -> None:
        self._wait = device.type != "cpu"
        self._device = device
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Add the time since the last mark to a stage."""
        if self._wait:
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
