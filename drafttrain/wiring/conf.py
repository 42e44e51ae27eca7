"""The folder of configurations, and what its comments say about each setting."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from drafttrain.errors import InputError

CONF_DIR_VARIABLE = "DRAFTTRAIN_CONF_DIR"


def conf_dir() -> Path:
    """The folder of configurations: `drafttrain/conf` in an installed package, `conf/` next to
    the package in a checkout."""
    given = os.environ.get(CONF_DIR_VARIABLE)
    package = Path(__file__).resolve().parent.parent
    candidates = [Path(given).resolve()] if given else [package / "conf", package.parent / "conf"]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise InputError(
        f"no configuration folder at {' or '.join(map(str, candidates))}: reinstall drafttrain"
    )


def _comments(path: Path, prefix: str = "") -> dict[str, str]:
    """{dotted key: the comment above it or after it} of a configuration file: what a setting means
    is written once, there."""
    found: dict[str, str] = {}
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        text = line.strip()
        match = re.match(r"^( *)([\w-]+):(?:\s[^#]*?)?(?:\s#\s*(.*))?$", line)
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        if match:
            indent, key, after = len(match.group(1)), match.group(2), match.group(3)
            parents = [(depth, name) for depth, name in parents if depth < indent]
            said = " ".join([*above, *([after.strip()] if after else [])])
            if said and key != "defaults":
                found[".".join([*filter(None, [prefix]), *(name for _, name in parents), key])] = (
                    said
                )
            parents.append((indent, key))
        above = []
    return found


def comments_of(door_name: str, choices: dict[str, Any]) -> dict[str, str]:
    found = _comments(conf_dir() / f"{door_name}.yaml")
    for group, chosen in choices.items():
        folder, _, package = group.partition("@")
        for name in chosen if isinstance(chosen, list) else [chosen]:
            if name is not None and folder != "experiment":
                found = {
                    **_comments(
                        conf_dir() / folder / f"{name}.yaml", package or folder.replace("/", ".")
                    ),
                    **found,
                }
    return found
