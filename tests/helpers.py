"""What several tests need: a tiny target that can chat, and a folder in which a door finds it with
a package."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.packaging.made import packed

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.content "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Its own text needs only single bytes, none of the tokenizer's pairs."""
ALTERNATING = (
    "{% for message in messages if message.role != 'system' %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
"""Refuses two turns of one role in a row."""


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Every byte is a token, and a few pairs are; 264 ids. "th" can thus be written as one id and
    as two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n")]
    words = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *letters,
        *("".join(pair) for pair in merges),
    ]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def tiny_chat_target(
    template: str = CHATML, *, seed: int = 0, stop_bias: float = 2.5, **settings: Any
) -> Target:
    """A random target with a tokenizer: 320 ids in the model, 264 in the tokenizer, turns end on
    <|im_end|> (id 2).

    Args:
        stop_bias: how much more likely than a random token the end of a turn is.
        settings: further arguments of `load.tiny`.
    """
    tokenizer = tiny_tokenizer(template)
    target = load.tiny(seed=seed, **settings)
    model = target.model
    with torch.no_grad():
        # A direction that hidden states share is the nearest thing to a bias that such a head has.
        ids = torch.randint(3, 259, (64, 32), generator=torch.Generator().manual_seed(1))
        hidden = target.base(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        mean = hidden.mean(0)
        model.get_output_embeddings().weight[2] = stop_bias * mean / mean.dot(mean)
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = 2
    return Target(model, tokenizer, target.name)


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_target(target: Target, folder: Path) -> Path:
    """The target as a directory that `target=hf target.path=<folder>` reads."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


def packed_place(folder: Path, target: Target, drafter: Eagle1, **settings: Any) -> Path:
    """Put the target and a package for it into a folder. Settings are those of `packed`."""
    save_target(target, folder / "target")
    packed(folder / "package", drafter, target, **settings)
    return folder


def place_words(place: Path, *more: str, **settings: Any) -> list[str]:
    """Words on a door's command line that decode with what `packed_place` put there: in float32, on
    the CPU, briefly."""
    given = {
        "package": place / "package",
        "target": "hf",
        "target.path": place / "target",
        "target.dtype": "float32",
        "target.device": "cpu",
        "dtype": "float32",
        "max_new_tokens": 16,
        **settings,
    }
    return [f"{key}={value}" for key, value in given.items()] + list(more)
