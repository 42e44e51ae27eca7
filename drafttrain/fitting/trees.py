"""Trees that nobody asked for are cut to what the drafter can fill; those that the command names
are refused where they are too deep or too wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drafttrain.training.job import Settings
from drafttrain.tree.topology import Growth, check_room
from drafttrain.wiring.composing import keys_named


def cut_defaults(
    settings: Settings, deepest: int | None, overrides: Sequence[str]
) -> tuple[Settings, str]:
    """The settings with no default tree deeper than the drafter fills, and what was cut, in words.

    Trees that the command names stay as they are.

    Args:
        deepest: of the nodes that the drafter fills; None is no limit.
        overrides: the words of the command.
    Returns: the words are empty where nothing was cut.
    """
    if deepest is None:
        return settings, ""
    keys = keys_named(overrides)
    cut: list[str] = []

    def fitted(where: str, tree: Growth) -> Growth:
        if tree.max_depth <= deepest or _names(keys, where):
            return tree
        cut.append(f"{where} ({tree.title})")
        return tree.capped(deepest)

    def fitted_all(where: str, trees: Mapping[str, Growth | None]) -> dict[str, Growth | None]:
        """A tree that is cut has a name that says so, and is left out where another is the same."""
        found = {name: tree and fitted(f"{where}.{name}", tree) for name, tree in trees.items()}
        kept = {name: tree for name, tree in found.items() if tree is trees[name]}
        for name, tree in found.items():
            if tree not in kept.values():
                kept[f"{name}_to_{deepest}"] = tree
        return kept

    final = settings.final
    settings = replace(
        settings,
        tree=fitted("tree", settings.tree),
        final=replace(
            final,
            acceptance=fitted_all("final.acceptance", final.acceptance),
            speed=fitted_all("final.speed", final.speed),
        ),
    )
    said = f"default trees are cut to a depth of {deepest}, all that this drafter fills: "
    return settings, said + ", ".join(cut) if cut else ""


def check_rooms(settings: Settings, deepest: int | None, choices: int | None) -> None:
    """Raise InputError for a tree that a drafter cannot fill, see `tree.topology.check_room`."""
    check_room(settings.tree, deepest, choices, "the tree")
    final = settings.final
    for table, trees in {"acceptance": final.acceptance, "speed": final.speed}.items():
        for name, tree in trees.items():
            if tree is not None:
                check_room(tree, deepest, choices, f"final.{table}.{name}")


def _names(keys: Sequence[str], where: str) -> bool:
    """Is a setting, a part of it or all around it among the keys of a command?"""
    return any(f"{key}.".startswith(f"{where}.") or where.startswith(f"{key}.") for key in keys)
