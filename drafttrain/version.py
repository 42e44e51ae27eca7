"""The installed version."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("drafttrain")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
