"""Write a package as an inference engine loads it, or check a directory that an engine is to load.

With package=<folder> to=<engine> out=<folder> the drafter is written in that engine's layout,
checked as if it came from elsewhere, and put in its place complete; the command that starts the
engine with it is printed. What no engine runs is refused, with what would.

With check=<directory> nothing is written: config.json and the tensors of any head are looked at
with an engine's eyes, offline, and each fault is printed by its name. Nothing of the directory is
run. The exit code is 1 if it would not work.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drafttrain.asking.export import check_settings
from drafttrain.wiring.doors import door

DOOR = door("export", check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

import torch

from drafttrain.errors import InputError
from drafttrain.layouts import checking, origin, pairs
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.pairs import Pair
from drafttrain.layouts.writing import CARD, Exported, Source, check_out, filled, put
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import CONFIG, DECODING, class_of, read_config
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.reporting.console import table
from drafttrain.target.model import Target
from drafttrain.target.naming import public
from drafttrain.tree.topology import Growth
from drafttrain.wiring.building import build

FEWEST = 3
"""Drafted tokens a round where the package decodes plainly."""

_CARD = """\
# {kind} drafter for {target}, as {engine} loads it

In this folder:

    {command}

Exported by drafttrain from a package with its measurements. Of no use with another target. {notes}
"""


@DOOR
def main(cfg: DictConfig) -> None:
    check_settings(cfg)
    if cfg.check is not None:
        show(checking.check_path(cfg.check, cfg.to, cfg.against), str(cfg.check))
        return
    package, out = Path(cfg.package).expanduser(), check_out(cfg.out)
    check_pair(package, cfg.to)
    target: Target = build(cfg.target, work="decode")
    exported = export_package(
        package, target, cfg.to, out, dtype=cfg.dtype, vocabulary=cfg.vocabulary, tokens=cfg.tokens
    )
    for note in exported.notes:
        say(note)
    say(
        f"{out}: {sum(path.stat().st_size for path in out.rglob('*') if path.is_file()) / 1e6:.2f} "
        "MB, checked"
    )
    print(exported.command)


# --- before long work starts ----------------------------------------------------------------------


def check_pair(package: Path, engine: str) -> Pair:
    """What writes this package for that engine.

    Raises: InputError for no package, for a pair that no engine serves, and for a package that was
        trained jointly with its target: engines would run the original, for which its drafter does
        not guess.
    """
    config = read_config(package)
    pair = pairs.pair_of(
        class_of(config["drafter"]["_target_"], str(package / CONFIG)), engine, config["drafter"]
    )
    if "adapter" in config:
        raise InputError(
            f"{package} was trained jointly with its target, which engines do not have: its "
            "drafter guesses for the tuned one. It decodes by drafttrain.load, or in transformers "
            "by custom_generate; engines serve heads of a frozen target"
        )
    return pair


# --- the export -----------------------------------------------------------------------------------


def export_package(
    package: Path,
    target: Target,
    engine: str,
    out: Path,
    *,
    dtype: str = "package",
    vocabulary: str = "auto",
    tokens: int | None = None,
) -> Exported:
    """Write a package in an engine's layout, check what was written, put it in its place.

    Args:
        out: a new or an empty folder; the others are the door's settings of these names.
    Returns: what was written, with the command that starts the engine.
    Raises: InputError, see `check_pair`, `check_out` and the layout's `write`; `out` is then as it
    was.
    """
    pair, out, config = check_pair(package, engine), check_out(out), read_config(package)
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    kept = getattr(torch, config["shape"]["dtype"] if dtype == "package" else dtype)
    drafted = tokens_of(tokens, read_plan(package / DECODING, drafter).tree, drafter.max_depth)
    readings = pair.readings
    source = Source(
        drafter, target, pair.engine, readings[pair.engine], readings, kept, vocabulary, drafted
    )
    exported = pair.write(source)
    name = public(config["target"]["name"])
    texts = {
        origin.FILE: origin.written(source, config, vocabulary != "whole"),
        CARD: card(type(drafter).__name__, name, exported, engine),
    }

    def found(head: Directory) -> list[Finding]:
        return [one for one in checked(head, source) if one.name not in exported.meant]

    put(out, exported, texts, target.tokenizer, found)
    return dataclasses.replace(exported, command=filled(exported.command, str(out), name))


def tokens_of(given: int | None, tree: Growth, deepest: int | None) -> int:
    """Drafted tokens a round: engines draft chains."""
    wanted = given or tree.max_depth or FEWEST
    if given and deepest is not None and given > deepest:
        raise InputError(f"tokens={given}: this drafter fills {deepest} places")
    return wanted if deepest is None else min(wanted, deepest)


def checked(head: Directory, source: Source[Any]) -> list[Finding]:
    """What is found in what was written, read again and compared with the live target's config."""
    config = json.loads(source.target.config.to_json_string(use_diff=False))
    return checking.check_directory(
        head, source.engine.reader.name, Directory(head.path, config, {}, ())
    )


def card(kind: str, target: str, exported: Exported, engine: str) -> str:
    command = filled(exported.command, ".", target)
    notes = "".join(f"\n\n{note[0].upper()}{note[1:]}." for note in exported.notes)
    return _CARD.format(kind=kind, target=target, engine=engine, command=command, notes=notes)


# --- the check ------------------------------------------------------------------------------------


def show(findings: list[Finding], where: str) -> None:
    """A table of what was found; leaves with exit code 1 if something would not work."""
    if not findings:
        print(f"{where}: nothing found")
        return
    rows = [
        ("error" if finding.fatal else "warning", finding.name, finding.said)
        for finding in findings
    ]
    table(where, ("", "name", "what"), sorted(rows))
    if any(finding.fatal for finding in findings):
        raise SystemExit(1)


def say(text: str) -> None:
    print(f"export: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
