"""Texts that the target wrote, kept with what drafters read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree


@dataclass(frozen=True)
class KeptText:
    """A prompt, its answer, and the target's features of both."""

    prompt: list[int]
    answer: list[int]
    """A stop token that ended it included."""
    hidden: Tensor
    """(s d) last hidden state, after the final norm, of the prompt's and the answer's tokens in
    this order; that of the answer's last token may be left out."""
    layers: dict[int, Tensor]
    """{l: (s d)} outputs of decoder layers."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


def sampled_texts(
    target: Target,
    prompts: Prompts,
    policy: Policy,
    *,
    max_new_tokens: int,
    layers: Sequence[int] = (),
    batch: int = 8,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    watch: Watch = unwatched,
) -> list[KeptText]:
    """Let the target answer prompts by itself, as plain decoding does with the same seed.

    Args:
        layers: those whose outputs are kept next to the last hidden state.
    Returns: a text a prompt, its features on the host in the target's dtype.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: a text to keep needs 1 or more")
    needs, found = Needs(last_hidden=True, layers=tuple(layers)), []
    for start in watch(range(0, len(prompts), batch), "batches sampled"):
        part = [list(prompt) for prompt in prompts[start : start + batch]]
        outputs, _ = decode(
            target,
            None,
            part,
            Plan(Tree.chain(0), policy),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            seed=seed,
            row_numbers=range(start, start + len(part)),
        )
        texts = [prompt + output.ids for prompt, output in zip(part, outputs, strict=True)]
        lengths = [len(ids) for ids in texts]
        # Filled up with a token of its own, as in decoding.
        ids = torch.tensor([ids + ids[-1:] * (max(lengths) - len(ids)) for ids in texts])
        features = target.features(ids, torch.tensor(lengths), needs)
        assert features.last_hidden is not None
        hidden = features.last_hidden.cpu()
        rows = {layer: value.cpu() for layer, value in features.layers.items()}
        for place, (prompt, output) in enumerate(zip(part, outputs, strict=True)):
            own = slice(lengths[place])
            kept = {layer: value[place, own].clone() for layer, value in rows.items()}
            found.append(KeptText(prompt, output.ids, hidden[place, own].clone(), kept))
    return found
