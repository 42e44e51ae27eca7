"""What an exported directory keeps of its package where its layout has no place for it:
`drafttrain.json`, which no engine reads.

With it an export becomes the same package again. Like the rest of a directory it is believed only
after it was checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.files import json_text
from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Engine
from drafttrain.layouts.writing import Source
from drafttrain.packaging.checking import check_keys, read_json
from drafttrain.packaging.manifest import EXPORTED, STORED, check_target, class_of
from drafttrain.packaging.settings import checked_settings
from drafttrain.target.model import Target
from drafttrain.version import version

FILE = EXPORTED
FORMAT = 1
_KEYS = (
    "format",
    "made_with",
    "engine",
    "drafter",
    "draft_ids",
    "trained_length",
    "target",
    "shape",
)
_LARGEST = 16 << 20


@dataclass(frozen=True)
class Origin:
    engine: Engine
    drafter: dict[str, Any]
    """The class and its settings, as in a package."""
    draft_ids: list[int] | None
    """Of a reduced vocabulary."""
    trained_length: int | None
    target: dict[str, Any]
    shape: dict[str, Any]
    """width and vocab_size of the target."""

    def settings(self, kind: type[Drafter], head: Directory) -> dict[str, Any]:
        """Settings that build this drafter again.

        Raises: InputError if they are of another class, or none.
        """
        where = f"{head.path / FILE}: drafter"
        if class_of(str(self.drafter.get("_target_")), where) is not kind:
            raise InputError(
                f"{where} is a {self.drafter['_target_']}, the directory holds {kind.__name__}"
            )
        settings = checked_settings(self.drafter, kind, where)
        return {**settings, "draft_ids": self.draft_ids}


def written(source: Source[Any], config: dict[str, Any], keeps_ids: bool) -> str:
    """The text of `drafttrain.json`.

    Args:
        config: the package's; keeps_ids: the drafter's vocabulary is still a reduced one.
    """
    ids = source.draft_ids
    return json_text(
        {
            "format": FORMAT,
            "made_with": f"drafttrain {version()}",
            "engine": source.engine.name,
            "drafter": {
                name: value for name, value in config["drafter"].items() if name not in STORED
            },
            "draft_ids": ids.tolist() if ids is not None and keeps_ids else None,
            "trained_length": config["trained_length"],
            "target": config["target"],
            "shape": {"width": source.target.width, "vocab_size": source.target.vocab_size},
        }
    )


def read_origin(head: Directory) -> Origin | None:
    """What a directory says of its package; None where it says nothing.

    Raises: InputError if it says something that cannot be.
    """
    path = head.path / FILE
    if not path.is_file():
        return None
    found = read_json(path, _LARGEST, "an export's origin")
    check_keys(found, _KEYS, str(path))
    if found["format"] != FORMAT or isinstance(found["format"], bool):
        raise InputError(f"{path}: format {str(found['format'])[:40]}, this version reads {FORMAT}")
    engine = engines.named(found["engine"])
    if engine is None:
        raise InputError(
            f"{path}: engine is {str(found['engine'])[:40]}, one of "
            f"{', '.join(engines.names(engines.KNOWN))} is known"
        )
    for name in ("drafter", "target", "shape"):
        if not isinstance(found[name], dict):
            raise InputError(f"{path}: {name} is not a mapping")
    marks, length = found["target"].get("fingerprint"), found["trained_length"]
    if not isinstance(marks, dict) or not all(isinstance(value, str) for value in marks.values()):
        raise InputError(f"{path}: target.fingerprint is not a mapping of digests")
    if not (length is None or (type(length) is int and length > 0)):
        raise InputError(
            f"{path}: trained_length is {str(length)[:40]}, needs a count of tokens or null"
        )
    ids, vocab_size = found["draft_ids"], found["shape"].get("vocab_size")
    if ids is not None:
        fits = isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
        if not fits or type(vocab_size) is not int:
            raise InputError(f"{path}: draft_ids needs a list of ids")
        try:
            vocabulary.check_ids(torch.tensor(ids, dtype=torch.int64), vocab_size)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
    return Origin(engine, found["drafter"], ids, length, found["target"], found["shape"])


def refuse_other_target(origin: Origin, target: Target, head: Directory) -> None:
    """Raise InputError unless the directory was exported for this very target."""
    config = {
        "target": {"name": str(origin.target.get("name")), **origin.target},
        "shape": origin.shape,
    }
    for key in ("width", "vocab_size"):
        if key not in origin.shape:
            raise InputError(f"{head.path / FILE}: shape lacks {key}")
    check_target(config, target, head.path)
