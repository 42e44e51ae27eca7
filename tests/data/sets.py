"""What sets need that tests write by hand."""

from __future__ import annotations

from typing import Any

ABOUT: dict[str, Any] = {
    "target": {"name": "t", "fingerprint": {"dtype": "float32"}},
    "prompts": {},
    "writing": {},
}
"""The parts that every manifest and every settings.json has."""
