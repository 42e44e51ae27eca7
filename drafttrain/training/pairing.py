"""Target, set and drafter put together for a run: set and device must fit, and a draft vocabulary
is chosen. At the end a target that was trained too is laid out for decoding."""

from __future__ import annotations

from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.vocabulary import always_proposable, coverage, most_frequent
from drafttrain.errors import InputError
from drafttrain.nn import packed
from drafttrain.target import fingerprint
from drafttrain.target.model import Target


def check_set(
    target: Target, data: ConversationData, held_out: ConversationData | None, path: str
) -> None:
    """Raise InputError unless this very target wrote the set, as far as that is known, and its rows
    fit into the target's context."""
    if data.fingerprint:  # Rows of data=tokens belong to no target.
        fingerprint.refuse_other(
            data.fingerprint, target.fingerprint, f"data.path={path}", own=target.tokenizer
        )
    data.check_vocabulary(target.vocab_size)
    longest = max(*data.lengths, *([] if held_out is None else held_out.lengths), 0)
    if longest > target.context:
        raise InputError(
            f"data.path={path} has rows of up to {longest} tokens, the target's context holds "
            f"{target.context_words}: set data.max_length={target.context}"
        )


def check_device(target: Target, accelerator: str) -> None:
    """Raise InputError if the target is elsewhere than where training was asked for."""
    wanted = {"auto": target.device.type, "gpu": "cuda"}.get(accelerator, accelerator)
    if wanted != target.device.type and not (
        wanted == "cuda" and target.device.type not in ("cpu", "mps")
    ):
        raise InputError(
            f"trainer.accelerator={accelerator}, and the target is on {target.device}: the drafter "
            "trains where the target is, so give only one of target.device and trainer.accelerator"
        )


def draft_vocabulary(
    target: Target, data: ConversationData, held_out: ConversationData | None, size: int
) -> tuple[Tensor, str]:
    """(size) int64 the ids that a drafter shall propose from, and what they cover in words.

    All labels of the split are counted, also where only a part of it is trained on.

    Raises: InputError for a size that cannot be had.
    """
    counts = data.label_counts(target.vocab_size)
    ids = most_frequent(counts, size, always_proposable(target, data))
    said = (
        f"draft vocabulary: {len(ids)} of {target.vocab_size} ids, {coverage(counts, ids):.1%} of "
        "training labels"
    )
    if held_out is not None:
        said += (
            f", {coverage(held_out.label_counts(target.vocab_size), ids):.1%} of held-out labels"
        )
    return ids, said + "; the rest count as misses"


def lay_out(target: Target, pack: str | bool | None) -> None:
    """Pack a target that was put together here, as its own loading would have done.

    Args:
        pack: the setting of that name; None where targets of this kind have none.
    """
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if pack is not None and target.device.type == "cpu" and packed.should_pack(pack, size):
        packed.pack(target.model)
