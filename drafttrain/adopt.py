"""Make a package of a head that was trained elsewhere, so that it decodes here and `fit
init_from=<package>` trains it further.

Takes over EAGLE-1 and EAGLE-3 heads (of vLLM, SGLang, EAGLE's authors, speculators), Medusa heads
(of vLLM, FasterDecoding, speculators) and draft models (directories of transformers). What
drafttrain's own drafter cannot be, such as a head of another width than the target's, is refused
with what differs. Only config.json and safetensors are read, and nothing of the directory is run.
"""

from __future__ import annotations

import re
import shlex
import sys

from omegaconf import DictConfig

from drafttrain.asking.adopt import check_settings
from drafttrain.wiring.doors import door

DOOR = door("adopt", check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

import torch

from drafttrain import runs
from drafttrain.checks import pasted
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.layouts.directory import Directory, how_to_convert, open_directory
from drafttrain.layouts.origin import Origin, read_origin, refuse_other_target
from drafttrain.layouts.pairs import holding, judge, reader_of
from drafttrain.layouts.writing import check_out
from drafttrain.packaging.writing import save_package
from drafttrain.runs import provenance
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from drafttrain.wiring.building import build


@DOOR
def main(cfg: DictConfig) -> None:
    head = read_head(cfg)
    origin = read_origin(head)
    target: Target = build(cfg.target, work="decode")
    drafter = read_drafter(head, target, origin)
    folder = save_package(
        cfg.out,
        drafter=drafter,
        target=target,
        plan=Plan(Tree.chain(min(cfg.chain, drafter.max_depth or cfg.chain))),
        metrics={"settings": {}, "rows": []},
        provenance={"adopted": True, **provenance(cfg)},
        trained_length=cfg.trained_length or (origin.trained_length if origin else None),
        dtype=dtype_of(head),
        say=say,
    )
    say(
        f"{type(drafter).__name__} for {target.name}; measure it: python -m drafttrain.evaluate "
        f"{pasted('package', folder)}{target_words()}"
    )
    say(
        f"train it further: python -m drafttrain.fit {pasted('init_from', folder)} "
        f"{fit_words(drafter, head)}{target_words()}"
    )


def read_head(cfg: DictConfig) -> Directory:
    """The directory, and everything that can be refused before the target is read.

    Raises: InputError.
    """
    check_settings(cfg)
    check_out(cfg.out)
    head = open_directory(cfg.head, "head")
    refuse_pickles(head)
    judge(head)
    return head


def refuse_pickles(head: Directory) -> None:
    if head.tensors:
        return
    if head.pickled:
        raise InputError(f"head={head.path}: {how_to_convert(head.pickled)}")
    raise InputError(f"head={head.path} holds no safetensors file")


def read_drafter(head: Directory, target: Target, origin: Origin | None) -> Drafter:
    """The drafter, with the settings that an export of drafttrain's has; the random state stays
    as it was.

    Args:
        origin: by `read_origin`.
    Raises: InputError if it is another target's, or no drafter of drafttrain's.
    """
    kind, read = reader_of(head)
    if origin is not None:
        refuse_other_target(origin, target, head)
    known = origin.settings(kind, head) if origin else {}
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return read(head, target, known)


def dtype_of(head: Directory) -> str:
    """In which the package keeps the weights without losing any of their bits."""
    kinds = {
        entry.dtype for entry in head.tensors.values() if entry.dtype in ("F32", "F16", "BF16")
    }
    return "bfloat16" if kinds == {"BF16"} else "float32"


def target_words() -> str:
    """The words of this command that name the target, as a shell takes them; none for the default
    one."""
    words = [word for word in runs.current.overrides if re.match(r"[+]{0,2}target[.=]", word)]
    return "".join(f" {shlex.quote(word)}" for word in words)


def fit_words(drafter: Drafter, head: Directory) -> str:
    """The settings with which `fit` builds the same drafter."""
    own = 0 if drafter.choices == drafter.target.vocab_size else drafter.choices
    words = [f"drafter={type(drafter).__module__.rpartition('.')[2]}", f"draft_vocab={own}"]
    for layout in holding(type(drafter)):
        shape = layout.shape(drafter, head)
        words += [pasted(f"drafter.{name}", value) for name, value in shape.items()]
    return " ".join(words)


def say(text: str) -> None:
    print(f"adopt: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
