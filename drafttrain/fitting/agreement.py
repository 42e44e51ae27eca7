"""Do all processes of a run have the same settings?"""

from __future__ import annotations

import json
from typing import Any

from drafttrain import companions
from drafttrain.checks import shown
from drafttrain.errors import InputError
from drafttrain.processes import world_size
from drafttrain.runs import differences, masked


def check_agreement(values: dict[str, Any]) -> None:
    """Raise InputError unless every process, on all machines, was given the same settings.

    Otherwise each would train something else, or they would wait for each other without end.

    Args:
        values: this process's configuration, plain.
    """
    if world_size() < 2:
        return
    given = companions.settings_of_all(masked(_comparable(values)))
    for other, theirs in given.items():
        found = differences(given[min(given)], theirs)
        if found:
            listed = "; ".join(
                f"{key} is {shown(mine)} and {shown(its)}"
                for key, (mine, its) in list(found.items())[:8]
            )
            who = f"ranks {min(given)} and {other}"
            raise InputError(
                f"{who} were started with different settings ({listed}): give all the same ones"
            )


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file. Which device a process has may be its own."""
    kept: dict[str, Any] = json.loads(json.dumps(values, default=str))
    if isinstance(kept.get("target"), dict):
        kept["target"].pop("device", None)
    return kept
