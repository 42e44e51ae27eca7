"""What evaluate says on the console."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(f"evaluate: {text}", file=sys.stderr, flush=True)
