"""Put an exported directory in its place: complete, or not at all, and only if its own checks find
nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError, writing
from drafttrain.files import even_modes, json_text, new_folder
from drafttrain.layouts import engines
from drafttrain.layouts.directory import CONFIG, Directory, open_directory
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.inspection import refuse
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.checking import some
from drafttrain.target.model import Target

MODEL = "model.safetensors"
CARD = "README.md"

R_co = TypeVar("R_co", bound=Reading, covariant=True)


@dataclass(frozen=True)
class Source(Generic[R_co]):
    """What is exported, and how."""

    drafter: Drafter
    target: Target
    engine: Engine
    reads: R_co
    """How the engine reads the layout."""
    readings: Mapping[Engine, R_co]
    """Of all engines that load it."""
    dtype: torch.dtype
    vocabulary: str = "auto"
    """`reduced` keeps the package's draft vocabulary, `whole` drafts from every token, `auto` keeps
    it where the layout can."""
    tokens: int = 4
    """Drafted tokens a round, for the command that starts the engine."""

    def command(self, tokens: int | None = None, **more: Any) -> str:
        """The command that starts the engine; tokens: another number, more: further settings."""
        settings = {**self.reads.settings, **more}
        return self.engine.start(self.reads.method, tokens or self.tokens, settings)

    def others(self, suits: Callable[[R_co], bool]) -> str:
        """`to=` of the engines whose reading suits, for messages."""
        found = (engine for engine, reads in self.readings.items() if suits(reads))
        return " or ".join(f"to={engine}" for engine in found)

    @property
    def draft_ids(self) -> Tensor | None:
        """(w) int64 ids of the package's reduced draft vocabulary, on the CPU."""
        ids: Tensor | None = getattr(self.drafter, "draft_ids", None)
        return None if ids is None else ids.cpu()

    def kept_ids(self, *, holds: bool, why: str) -> Tensor | None:
        """The draft vocabulary that is written, where the layout holds one.

        Args:
            why: the reason why this layout holds none.
        Raises: InputError if one is asked for and cannot be had.
        """
        ids = self.draft_ids
        if self.vocabulary == "reduced" and ids is None:
            raise InputError(
                "vocabulary=reduced: this package drafts from the full vocabulary; set "
                "vocabulary=auto"
            )
        if self.vocabulary == "reduced" and not holds:
            raise InputError(f"vocabulary=reduced: {why}; set vocabulary=auto")
        return ids if holds and self.vocabulary != "whole" else None


@dataclass(frozen=True)
class Exported:
    """A directory that is to be written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    command: str
    """It starts the engine with it; {out} is the place of the directory, {target} of the target."""
    file: str = MODEL
    texts: dict[str, str] = field(default_factory=dict)
    """Further files."""
    shards: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Further files of tensors, such as the target's own; their index is one of `texts`."""
    tokenizer: bool = False
    """Does the engine look for the target's tokenizer here?"""
    copied: Callable[[Path], None] | None = None
    """Writes a folder's files by itself, in place of config and tensors; what is there then is not
    replaced by texts."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    meant: tuple[str, ...] = ()
    """Faults that the check will find and that are none here."""


def filled(command: str, out: str, target: str) -> str:
    """The command with both names in it, whatever signs they have: as a shell's word, in JSON in a
    shell's quotes, or in Python."""
    shell = engines.in_a_shell(command)

    def name(place: re.Match[str]) -> str:
        given = out if place[2] == "out" else target
        if place[0].startswith('"') and shell:
            return json.dumps(given, ensure_ascii=False).replace("'", "'\\''")
        return shlex.quote(given) if place[0].startswith("{") else repr(given)

    return re.sub(r"""(["']?)\{(out|target)\}\1""", name, command)


def stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in the dtype that is written, each with memory of its own; ids and marks stay as they
    are.

    Raises: InputError if a weight is no finite number, or none any more in that dtype.
    """
    kept = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        copied = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        kept[name] = copied.clone(memory_format=torch.contiguous_format)
    bad = spoilt(kept)
    if bad:
        word = str(dtype).removeprefix("torch.")
        raise InputError(
            f"{SPOILT} {some(bad)} as {word}: give dtype=float32, or train the drafter again"
        )
    return kept


def check_out(out: str | os.PathLike[str]) -> Path:
    """Where a directory can be put without touching anything. Worth calling before long work.

    Raises: InputError unless it does not exist yet or is an empty folder, in a place where folders
    can be made.
    """
    folder = Path(os.path.abspath(Path(out).expanduser()))
    if folder.is_symlink():
        raise InputError(f"out={out} is a link: give the folder itself")
    above = next(parent for parent in folder.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(
            f"out={out} cannot be made: {above} is not a folder that can be written to"
        )
    _scratch(
        folder, above
    ).rmdir()  # Some systems, such as /proc, say that they take folders and do not.
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise InputError(f"out={out} is a file: give a new folder")
    held = sorted(entry.name for entry in folder.iterdir())
    if held:
        raise InputError(
            f"out={out} holds {some(held)}: give a new or an empty folder, nothing is ever replaced"
        )
    here = Path.cwd().resolve()
    if here == folder.resolve() or folder.resolve() in here.parents:
        raise InputError(
            f"out={out} holds the folder this program runs in: give a folder of its own"
        )
    return folder


def _scratch(out: Path, above: Path) -> Path:
    """A new empty folder in one that is made if need be, named after what will be in it; raises
    InputError."""
    try:
        above.mkdir(parents=True, exist_ok=True)
        return new_folder(above, out.name)
    except OSError as error:
        raise InputError(
            f"out={out} cannot be made: no folder can be made in {above} ({error.strerror})"
        ) from error


def _fill(scratch: Path, out: Path, exported: Exported, texts: dict[str, str]) -> None:
    if exported.copied is not None:
        with writing(out):
            exported.copied(scratch)
        written = {name: text for name, text in texts.items() if not (scratch / name).exists()}
    else:
        for name, tensors in {exported.file: exported.tensors, **exported.shards}.items():
            with writing(out / name):
                save_file(tensors, scratch / name, metadata={"format": "pt"})
        written = {CONFIG: json_text(exported.config), **exported.texts, **texts}
    for name, text in written.items():
        with writing(out / name):
            (scratch / name).write_text(text, encoding="utf-8")


def put(
    out: Path,
    exported: Exported,
    texts: dict[str, str],
    tokenizer: Any | None,
    check: Callable[[Directory], list[Finding]],
) -> Path:
    """Write a directory next to its place, check it there as if it were foreign, then put it in its
    place.

    Args:
        out: as `check_out` gives it.
        texts: files next to those of the layout.
        tokenizer: written where the layout needs one and the target has one.
        check: what it finds in the directory keeps it from being put there.
    Raises: InputError for what was found, OSError if the disk is full. `out` is then as it was.
    """
    scratch = _scratch(out, out.parent)
    try:
        _fill(scratch, out, exported, texts)
        if exported.tokenizer and tokenizer is not None:
            with writing(out):
                tokenizer.save_pretrained(scratch)
        for file in filter(Path.is_file, scratch.rglob("*")):
            with writing(out / file.name), file.open("rb") as written:
                os.fsync(written.fileno())
        even_modes(scratch)
        refuse(check(open_directory(scratch, "out")), f"this export to {out} would not work")
        check_out(out)
        was_there = out.exists()
        if was_there:
            out.rmdir()  # empty; some systems do not rename onto a folder that exists
        try:
            scratch.rename(out)
        except BaseException:
            if was_there:
                out.mkdir()
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out
