"""A stand-in for the target where its greedy answers are known: decoding without a pass of it.

At temperature 0 the text does not depend on the drafter. So what the target would say of a draft
can be looked up: after a token of its answer, the answer's next token, with the features that the
target had there. A draft off the answer hangs below one that is refused, so what is said of it is
never used. The drafter, its cache, its trees, the rule, stop tokens and limits are those of real
decoding.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.files import write_atomic
from drafttrain.flow import Needs, PartialPass
from drafttrain.nn import finite
from drafttrain.nn.cache import KVCache
from drafttrain.target.model import Pass, Target

_AT_ONCE = 4096
"""Tokens that the target reads in one pass for their features."""
LAST = "last_hidden"
MOST_KEPT = 1 << 30
"""Bytes of features that are kept from one run to the next; more are read again."""


@dataclass(frozen=True)
class Answer:
    """What the target writes after a prompt at temperature 0."""

    ids: tuple[int, ...]
    ended: bool
    """Does the text end here, by a stop token or the end of the target's context?"""

    def covers(self, limit: int) -> bool:
        """Is this all that is written within that many tokens?"""
        return self.ended or len(self.ids) >= limit


Answers = dict[tuple[int, ...], Answer]
"""{ids of a prompt: its answer}"""


@dataclass(frozen=True)
class Kept:
    """Texts with the features that the target had at each of their tokens, one after another."""

    answers: Answers
    starts: dict[tuple[int, ...], int]
    """{prompt: place of its first token}"""
    ids: Tensor
    """(t) int64, prompts and answers."""
    hidden: Tensor
    """(t d) last hidden states; (t 0) where none are kept."""
    layers: dict[int, Tensor]
    """{l: (t d)} outputs of layers."""

    @property
    def bytes(self) -> int:
        """Of the features."""
        return sum(part.nbytes for part in (self.hidden, *self.layers.values()))


@torch.inference_mode()
def keep(target: Target, answers: Answers, needs: Needs, folder: Path | None = None) -> Kept:
    """Read every answer once, and keep the features that a drafter needs.

    Args:
        folder: where features of these answers are kept from one run to the next; those that lie
            there are not read again. None keeps nothing.
    Raises: InputError for features that are not finite.
    """
    texts = [(prompt, [*prompt, *answer.ids]) for prompt, answer in answers.items()]
    texts.sort(key=lambda one: (len(one[1]), one[1]))
    ends = np.cumsum([0, *(len(text) for _, text in texts)]).tolist()
    starts = {prompt: end for (prompt, _), end in zip(texts, ends, strict=False)}
    ids = torch.tensor([token for _, text in texts for token in text], dtype=torch.int64)
    wanted = [LAST] if needs.last_hidden else []
    wanted += [f"layer_{layer}" for layer in needs.layers]
    marks = _marks(ids)
    parts = {} if folder is None else _read(folder, wanted, marks)
    missing = [name for name in wanted if name not in parts]
    if missing:
        made = _features(target, [text for _, text in texts], missing)
        if folder is not None and sum(part.nbytes for part in made.values()) <= MOST_KEPT:
            _write(folder, made, marks)
        parts |= made
    parts = {name: part.to(target.device, target.dtype) for name, part in parts.items()}
    none = torch.empty(len(ids), 0, dtype=target.dtype, device=target.device)
    layers = {layer: parts[f"layer_{layer}"] for layer in needs.layers}
    return Kept(answers, starts, ids.to(target.device), parts.get(LAST, none), layers)


def _features(target: Target, texts: list[list[int]], names: list[str]) -> dict[str, Tensor]:
    """{part: (t d)} of all texts, one after another."""
    needs = Needs(
        last_hidden=LAST in names,
        layers=tuple(int(name.removeprefix("layer_")) for name in names if name != LAST),
    )
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for group in _groups(texts):
        lengths = [len(text) for text in group]
        rows = [text + text[-1:] * (max(lengths) - len(text)) for text in group]
        read = target.features(torch.tensor(rows), torch.tensor(lengths), needs)
        for name, parts in found.items():
            values = read.last_hidden if name == LAST else read.layers[int(name[6:])]
            assert values is not None
            for text, row in zip(group, values, strict=True):
                own = row[: len(text)].clone()  # Holds no padding.
                if not bool(torch.isfinite(own).all()):
                    raise finite.fault(target, text, "a held-out prompt with its answer")
                parts.append(own)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _groups(texts: list[list[int]]) -> list[list[list[int]]]:
    """Texts that are read together, those of like length; they come sorted by length."""
    groups: list[list[list[int]]] = []
    for text in texts:
        if groups and (len(groups[-1]) + 1) * len(text) <= _AT_ONCE:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


# --- features from one run to the next ------------------------------------------------------------


def _marks(ids: Tensor) -> dict[str, str]:
    """What features depend on apart from the target, which the folder is of."""
    return {
        "ids": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _read(folder: Path, names: list[str], marks: dict[str, str]) -> dict[str, Tensor]:
    """Those parts that lie in a folder, are of these texts, and can be used."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError, SafetensorError, ValueError):
            with safe_open(folder / f"{name}.safetensors", "pt") as file:
                if file.metadata() != marks:
                    continue
                values = file.get_tensor(name)
            if bool(torch.isfinite(values).all()):
                found[name] = values
    return found


def _write(folder: Path, parts: dict[str, Tensor], marks: dict[str, str]) -> None:
    """What cannot be written is read again by the next run."""
    with contextlib.suppress(OSError, InputError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in parts.items():
            own = {name: values.cpu().contiguous()}
            write_atomic(
                folder / f"{name}.safetensors",
                lambda path, own=own: save_file(own, path, marks),  # type: ignore[misc]
            )


class _Places(KVCache):
    """Remembers of every row where its text lies, and how much of it has been read."""

    def __init__(self, starts: Tensor, ends: Tensor, capacity: int) -> None:
        super().__init__(len(starts), capacity, starts.device)
        self.starts, self.ends = starts, ends

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.starts, self.ends = self.starts[rows], self.ends[rows]


class Replay(Target):
    """Decodes as the target does, at temperature 0 and from known prompts.

    Args:
        target: whose answers these are; its facts, embedding and head are used, its layers are not.
    """

    def __init__(self, target: Target, kept: Kept) -> None:
        # The target has been tried already, so `Target.__init__` is left out.
        vars(self).update(vars(target))
        self.kept = kept

    def serves(self, needs: Needs) -> bool:
        """Are the features kept that a drafter reads?"""
        there = self.kept.hidden.shape[-1] > 0 or not needs.last_hidden
        return there and set(needs.layers) <= self.kept.layers.keys()

    def lacks(
        self, prompts: Sequence[Sequence[int]], limit: int, stop_ids: Sequence[int] | None
    ) -> str | None:
        """Why the answers do not show what decoding would write; None if they do.

        Args:
            limit: new tokens that are asked for.
            stop_ids: tokens that end a text; None: the target's own.
        """
        if stop_ids is not None and not set(self.stop_ids) <= set(stop_ids):
            return "the answers end at the target's own stop tokens"
        answers = [self.kept.answers.get(tuple(prompt)) for prompt in prompts]
        unknown = sum(answer is None for answer in answers)
        if unknown:
            return f"{unknown} of {len(prompts)} prompts have no answer"
        short = sum(answer is not None and not answer.covers(limit) for answer in answers)
        if short:
            return f"{short} of {len(prompts)} answers are shorter than {limit} tokens"
        return None

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> KVCache:
        known = [tuple(prompt) for prompt in prompts]
        starts = [self.kept.starts[prompt] for prompt in known]
        ends = [
            start + len(prompt) + len(self.kept.answers[prompt].ids)
            for start, prompt in zip(starts, known, strict=True)
        ]
        device = self.kept.ids.device
        return _Places(
            torch.tensor(starts, device=device), torch.tensor(ends, device=device), capacity
        )

    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
        partial_pass: PartialPass | None = None,
    ) -> Pass:
        """Look up the features at each token's place in its text; arguments as for a target.

        Places after the end of a text give those of its last token.
        """
        assert isinstance(cache, _Places) and partial_pass is None
        if depths is None:
            depths = torch.arange(ids.shape[1], device=ids.device)[None]
        places = (cache.starts + cache.lengths)[:, None] + depths
        last = cache.ends[:, None] - 1
        places = places.minimum(last)
        kept = self.kept
        return Pass(
            hidden=kept.hidden[places],
            layers={layer: kept.layers[layer][places] for layer in layers},
            following=kept.ids[(places + 1).minimum(last)],
        )

    def choices(self, out: Pass) -> Tensor:
        assert out.following is not None
        return out.following

    def head(self, hidden: Tensor) -> Tensor:
        raise InputError(
            "kept answers hold what the target chose at temperature 0, no logits: decode with the "
            "target itself"
        )
