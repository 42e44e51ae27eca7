"""Start training from the weights of a package, which is checked like any package."""

from __future__ import annotations

from drafttrain.checks import path_of
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import read_config
from drafttrain.packaging.reading import load_drafter
from drafttrain.target.model import Target


def check_beginning(folder: str) -> None:
    """What can be refused before the target is there."""
    try:
        config = read_config(path_of("init_from", folder))
    except InputError as error:
        raise InputError(f"init_from={folder} cannot be used: {error}") from error
    if "adapter" in config:
        raise InputError(
            f"init_from={folder} was trained jointly with its target, which would start again as "
            "the original: give a package of only heads, such as experiment=medusa1 makes, or "
            "continue that run with resume=last"
        )


def read_beginning(folder: str, target: Target, kind: type[Drafter], draft_vocab: int) -> Drafter:
    """The drafter of that package.

    Args:
        kind: the class to be trained; draft_vocab: ids that it proposes from, 0 for all.
    """
    try:
        given = load_drafter(folder, target)
    except InputError as error:
        raise InputError(f"init_from={folder} cannot be used: {error}") from error
    if type(given) is not kind:
        raise InputError(
            f"init_from={folder} holds a {type(given).__name__}, the drafter is a {kind.__name__}"
        )
    if given.choices != (draft_vocab or target.vocab_size):
        own = 0 if given.choices == target.vocab_size else given.choices
        raise InputError(
            f"init_from={folder} proposes from {given.choices} tokens, draft_vocab={draft_vocab}: "
            f"set draft_vocab={own}"
        )
    return given


def take_weights(drafter: Drafter, given: Drafter, folder: str) -> None:
    """Raises: InputError if the drafters have other settings, so that the weights do not fit."""
    own, theirs = (
        {name: tuple(v.shape) for name, v in one.state_dict().items()} for one in (drafter, given)
    )
    if own != theirs:
        odd = sorted(
            name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)
        )
        raise InputError(
            f"init_from={folder} has other weights than this drafter ({len(odd)} of them, such as "
            f"{odd[0]}): give the settings that it was trained with, drafter.*"
        )
    drafter.load_state_dict(given.state_dict())
