"""How joint training changed a target: how well both explain held-out text, and how far apart their
distributions are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from drafttrain.flow import Batch, Needs
from drafttrain.target.model import Target


@torch.inference_mode()
def change(
    original: Target, tuned: Target, batches: Iterable[Batch], *, chunk: int = 256
) -> dict[str, Any] | None:
    """Compare two targets at the supervised tokens of some rows, given the true text before each.

    Args:
        chunk: positions whose logits exist at one time.
    Returns: rows and tokens compared; the perplexity of both on these tokens; kl, the mean of
        KL(p_original || p_tuned) in nats; agreement, the share of tokens at which both have the
        same greedy choice. None where no token was compared.
    """
    rows = tokens = same = 0
    original_nats = tuned_nats = kl = 0.0
    for batch in batches:
        row, place = batch.loss_mask.to(original.device).nonzero(as_tuple=True)
        row, place = row[place >= 1], place[place >= 1]
        labels = batch.input_ids.to(original.device)[row, place]
        hidden = []
        for one in (original, tuned):
            found = one.features(
                batch.input_ids, batch.lengths, Needs(last_hidden=True)
            ).last_hidden
            assert found is not None
            hidden.append(found[row, place - 1])
        rows, tokens = rows + len(batch.lengths), tokens + len(labels)
        for label, first, second in zip(
            labels.split(chunk), hidden[0].split(chunk), hidden[1].split(chunk), strict=True
        ):
            log_p = original.head(first).float().log_softmax(-1)
            log_q = tuned.head(second).float().log_softmax(-1)
            original_nats -= float(log_p.gather(1, label[:, None]).sum())
            tuned_nats -= float(log_q.gather(1, label[:, None]).sum())
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    if not tokens:
        return None
    return {
        "rows": rows,
        "tokens": tokens,
        "perplexity_original": math.exp(original_nats / tokens),
        "perplexity_tuned": math.exp(tuned_nats / tokens),
        "kl": kl / tokens,
        "agreement": same / tokens,
    }


def words(found: dict[str, Any]) -> str:
    """A line for people."""
    return (
        f"what joint training did to the target, on {found['rows']} held-out rows "
        f"({found['tokens']:,} tokens): perplexity {found['perplexity_original']:.3f} before, "
        f"{found['perplexity_tuned']:.3f} now; KL to the original {found['kl']:.4f} nats a token; "
        f"the same greedy choice at {found['agreement']:.1%}"
    )
