"""Packages of single drafters as one drafter that holds them all."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import read_config
from drafttrain.packaging.reading import load_drafter
from drafttrain.target.model import Target


def check_packages(packages: object) -> list[str]:
    """What can be refused before the target is there.

    Raises: InputError for anything but a list of packages, and for a package whose drafter drafts
    for a tuned target.
    """
    listed = (
        list(packages) if isinstance(packages, Sequence) and not isinstance(packages, str) else []
    )
    if not listed or not all(isinstance(one, str) for one in listed):
        raise InputError(
            f"drafter.packages={packages}: needs a list of packages' folders, such as "
            "[runs/one/package,runs/two/package]"
        )
    for folder in listed:
        if "adapter" in read_config(folder):
            raise InputError(
                f"drafter.packages: {folder} was trained jointly with its target and drafts for "
                "the tuned one, the others for the original: leave it out"
            )
    return listed


def ensemble(target: Target, *, packages: Sequence[str]) -> Ensemble:
    """The drafters of some packages as one; the members of an ensemble's package count as its own.

    Raises: InputError as `load_drafter`, for each of them.
    """
    members: list[Drafter] = []
    for folder in check_packages(packages):
        found = load_drafter(folder, target)
        members += found.drafters if isinstance(found, Ensemble) else [found]
    return Ensemble(target, members=members)
