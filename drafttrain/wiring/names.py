"""Names of settings: whether one exists, the nearest that does, and the sentence for one that does
not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf


def dotted_keys(config: DictConfig) -> list[str]:
    """Every key of a configuration, inner nodes included, as it is written on the command line."""

    def walk(node: Any, prefix: str) -> Iterable[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield f"{prefix}{key}"
                yield from walk(value, f"{prefix}{key}.")

    return list(walk(OmegaConf.to_container(config, resolve=False), ""))


def has_key(settings: Any, key: str) -> bool:
    """Whether a configuration, as plain mappings and lists, has a dotted key. An empty mapping is
    open: anything may be put in it."""
    node = settings
    for part in re.sub(r"\[(\w+)\]", r".\1", key).split("."):
        if isinstance(node, dict):
            names = {str(name): value for name, value in node.items()}
            if part not in names:
                return not names
            node = names[part]
        elif (
            isinstance(node, list)
            and part.lstrip("-").isdigit()
            and -len(node) <= int(part) < len(node)
        ):
            node = node[int(part)]
        else:
            return False
    return True


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """The valid names a person most likely meant: the same word in another section, or a likely
    misspelling; best first."""

    def alike(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    found = []
    for candidate in sorted(set(candidates)):
        tail, full = (
            alike(name.rpartition(".")[2], candidate.rpartition(".")[2]),
            alike(name, candidate),
        )
        if tail >= 0.7 or full >= 0.85:
            found.append((-tail - full, candidate))
    return [candidate for _, candidate in sorted(found)[:limit]]


def unknown_key(given: str, key: str, config: DictConfig, choices: dict[str, Any]) -> str:
    keys = [k for k in dotted_keys(config) if not k.rpartition(".")[2].startswith("_")]
    section = key.rpartition(".")[0]
    while section and section not in keys:
        section = section.rpartition(".")[0]
    if section and not OmegaConf.is_dict(OmegaConf.select(config, section, throw_on_missing=False)):
        return (
            f"{given}: there is no setting {key}. {section} is a single value: did you mean "
            f"{section}=...?"
        )
    if section:
        inside = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section]
    else:
        inside = sorted({*(k for k in keys if "." not in k), *choices})
    near = [n for n in nearest(key, [*keys, *choices], 5) if not f"{key}.".startswith(f"{n}.")][:3]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    where = f"{section} has" if section else "The settings are"
    return f"{given}: there is no setting {key}.{hint} {where}: {join(inside)}"


def unknown_choice(given: str, group: str, name: str, options: Sequence[str]) -> str:
    near = nearest(name, options, limit=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{given}: there is no {group} {name}.{hint} Choices: {join(options)}"


def join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
