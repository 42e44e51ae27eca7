"""A package as transformers runs it: `model.generate(..., custom_generate=<package>,
trust_remote_code=True)`.

transformers prepares everything as for its own decoding (settings, padding mask, lengths,
processors, stopping criteria) and hands it over; here it is either honoured or refused. Nothing
that would change the text is ignored.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.decoding.loop import Ends
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load
from drafttrain.target.model import Target

_READ = {
    "attention_mask",
    "position_ids",
    "use_cache",
    "cache",
    "past_key_values",
    "logits_to_keep",
}
"""Prepared by transformers for a model's forward pass; this runtime has its own instead."""
_SAMPLING = (
    "SequenceBiasLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "LogitNormalization",
)
"""What a policy can do, in the order in which it does it."""
_UNWANTED = (
    "assistant_model",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
    "token_healing",
)
_STOPPING = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Criteria that the loop itself knows: a length and stop tokens."""
_MEMORY = "_drafttrain_speculators"


def generate(model: Any, *, package: str | os.PathLike[str] | None = None, **arguments: Any) -> Any:
    """What `custom_generate/generate.py` of a package calls; arguments as for `model.generate`.

    Args:
        package: the package's folder; None is the one given as `custom_generate`.
    Returns: as `model.generate`: ids with the prompts, or an output object if
    `return_dict_in_generate`.
    Raises: InputError for settings that cannot be honoured.
    """
    folder = Path(package if package is not None else _asked_for()).expanduser()
    _refuse_arguments(arguments)
    streamer = arguments.get("streamer")

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **prepared: Any,
    ) -> Any:
        limit = _limit(stopping_criteria, input_ids)
        prompts = _prompts(input_ids, prepared)
        lengths = [len(prompt) for prompt in prompts]
        policy = _policy(generation_config, logits_processor, input_ids.shape[1], lengths)
        if streamer is not None and len(prompts) > 1:
            raise InputError(
                f"a streamer shows one text, {len(prompts)} are decoded: give one prompt, or no "
                "streamer"
            )
        with _as_it_was(model):
            speculator = _speculator(folder, model)
            _check_context(speculator, max(lengths), limit)
            end = generation_config._eos_token_tensor
            outputs, _ = speculator.generate(
                prompts,
                max_new_tokens=limit,
                plan=_plan(speculator.plan, policy),
                stop_ids=[] if end is None else end.tolist(),
                ends=_ends(stopping_criteria, input_ids),
                listener=None if streamer is None else lambda _row, ids, _kept: _put(streamer, ids),
            )
        if streamer is not None:
            streamer.end()
        return _answer(input_ids, [output.ids for output in outputs], generation_config)

    with _given_tokenizer(model, arguments.get("tokenizer")):
        return model.generate(custom_generate=decode, **arguments)


@contextlib.contextmanager
def _given_tokenizer(model: Any, tokenizer: Any) -> Iterator[None]:
    """The tokenizer that stop strings are read with, wherever they are set: for a callable
    transformers drops it before it makes the criteria."""
    if tokenizer is None:
        yield
        return
    made = model._get_stopping_criteria

    def with_tokenizer(*given: Any, **named: Any) -> Any:
        return made(*given, **{**named, "tokenizer": tokenizer})

    model._get_stopping_criteria = with_tokenizer
    try:
        yield
    finally:
        del model._get_stopping_criteria


def _refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raise InputError for arguments that would change the text, or have no use here."""
    for name in _UNWANTED:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise InputError(
                f"{name} cannot be honoured while decoding with a drafttrain package: leave it out"
            )
    if arguments.get("assistant_tokenizer") is not None:
        raise InputError(
            "assistant_tokenizer has no use while decoding with a drafttrain package: leave it out"
        )


def _check_context(speculator: Speculator, longest: int, limit: int) -> None:
    context = speculator.target.context
    if longest + limit > context:
        raise InputError(
            f"a prompt of {longest} tokens and {limit} new ones exceed the target's context of "
            f"{speculator.target.context_words}: lower max_new_tokens"
        )


def _asked_for() -> str:
    """The value of `custom_generate` in the call of `generate` that led here: transformers does not
    pass it on."""
    frame = sys._getframe()
    while frame is not None:
        asked = (
            frame.f_locals.get("custom_generate") if frame.f_code.co_name == "generate" else None
        )
        if isinstance(asked, str) and frame.f_globals.get("__name__", "").startswith(
            "transformers."
        ):
            if not Path(asked).expanduser().is_dir():
                raise InputError(
                    f"custom_generate={asked} is not a folder here: download the package and give "
                    "its folder, or name a local copy by package=<folder>"
                )
            return asked
        frame = frame.f_back  # type: ignore[assignment]
    raise InputError("the package's folder is not known: add package=<folder> to generate(...)")


def _speculator(folder: Path, model: nn.Module) -> Speculator:
    """One for each package and model, kept with the model as long as the package's files do not
    change. That of a package with an adapter decodes with a tuned copy of the model."""
    kept: dict[Path, tuple[Any, Speculator]] = model.__dict__.setdefault(_MEMORY, {})
    place = folder.resolve()
    stamp: tuple[Any, ...] = tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(place.glob("*.*"))
    )
    first = next(model.parameters())
    # Weights of a tuned copy do not move with the model's.
    stamp = (*stamp, first.dtype, first.device)
    known = kept.get(place)
    moved = known is not None and known[1].drafter.device != known[1].target.device
    if known is None or known[0] != stamp or moved:
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        target = Target(model, None, name)
        known = kept[place] = (stamp, load(folder, target))
    return known[1]


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """A target is frozen and in evaluation mode; afterwards the caller's model is as before."""
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


def _ends(criteria: Any, input_ids: Tensor) -> Ends | None:
    """Further criteria, asked after every token of a row, as if there were no other row: its text
    does not depend on its neighbours. They get only the ids: a drafted token has no scores."""
    asked = [one for one in criteria if type(one).__name__ not in _STOPPING]
    if not asked:
        return None

    def ends(row: int, written: list[int]) -> bool:
        so_far = torch.cat((input_ids[row], input_ids.new_tensor(written)))[None]
        return any(bool(torch.as_tensor(one(so_far, None)).all()) for one in asked)

    return ends


def _limit(criteria: Any, input_ids: Tensor) -> int:
    return (
        min(one.max_length for one in criteria if hasattr(one, "max_length")) - input_ids.shape[1]
    )


def _policy(settings: Any, processors: Any, width: int, lengths: list[int]) -> Policy:
    """The sampling that the prepared processors amount to.

    Args:
        width: length of the padded prompts; lengths: of each without its padding.
    """
    mode = str(getattr(settings.get_generation_mode(), "value", ""))
    if mode not in ("greedy_search", "sample"):
        raise InputError(
            f"{mode.replace('_', ' ')} cannot be honoured while decoding with a drafttrain "
            "package: greedy decoding and sampling can (num_beams=1)"
        )
    names = [type(one).__name__ for one in processors]
    odd = sorted(set(names) - set(_SAMPLING))
    if odd:
        raise InputError(
            f"{', '.join(odd)} would change the text and cannot be honoured while decoding with a "
            "drafttrain package: temperature, top_k, top_p, min_p, repetition_penalty, "
            "min_new_tokens, min_length and sequence_bias of single tokens can; leave the rest "
            "out (it may come from model.generation_config)"
        )
    if names != sorted(set(names), key=_SAMPLING.index):
        raise InputError(
            f"logits processors {', '.join(names)}: can be honoured once each and in the order "
            f"{', '.join(_SAMPLING)} only"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(settings, name, None):
            raise InputError(
                f"{name} cannot be given while decoding with a drafttrain package: leave it out"
            )
    if getattr(settings, "cache_implementation", None) == "quantized" or getattr(
        settings, "token_healing", None
    ):
        raise InputError("a quantized cache or token healing changes the text: leave it out")
    found: dict[str, Any] = {}
    for name, one in zip(names, processors, strict=True):
        if name == "SequenceBiasLogitsProcessor":
            found["logit_bias"] = _single_tokens(one.sequence_bias)
        elif name == "RepetitionPenaltyLogitsProcessor":
            found["repetition_penalty"] = _penalty(one, width, lengths)
        elif name.startswith("Min") and name != "MinPLogitsWarper":
            least = _least(one, width, settings._eos_token_tensor)
            found["min_new_tokens"] = max(least, found.get("min_new_tokens", 0))
    if not settings.do_sample:
        return Policy(**found)
    found["temperature"] = 1.0
    for one in processors:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if hasattr(one, name):
                found[name] = getattr(one, name)
    return Policy(**found)


def _single_tokens(bias: dict[tuple[int, ...], float]) -> dict[int, float]:
    for ids in bias:
        if len(ids) > 1:
            raise InputError(
                f"sequence_bias of {ids} cannot be honoured: give single tokens, such as [[[5], "
                "2.0]]"
            )
    return {int(ids[0]): float(value) for ids, value in bias.items()}


def _penalty(one: Any, width: int, lengths: list[int]) -> float:
    """The penalty on the complete text without its padding; one that leaves a prompt out is
    refused."""
    left_out = 0 if one.prompt_ignore_length is None else one.prompt_ignore_length
    padding = [width - length for length in lengths]
    ignored = [left_out] * len(padding) if isinstance(left_out, int) else left_out.tolist()
    if ignored != padding:
        raise InputError(
            f"RepetitionPenaltyLogitsProcessor with prompt_ignore_length {ignored} cannot be "
            f"honoured, the prompts' padding is {padding}: give repetition_penalty=... instead"
        )
    return float(one.penalty)


def _least(one: Any, width: int, end: Any) -> int:
    """New tokens that a least length comes to; a length of the complete text counts padding, as
    transformers does."""
    same = end is not None and sorted(one.eos_token_id.tolist()) == sorted(end.tolist())
    if getattr(one, "prompt_length_to_skip", width) != width or not same:
        raise InputError(
            f"{type(one).__name__} with another prompt length or other stop tokens than this "
            "call's cannot be honoured: give min_new_tokens=... instead"
        )
    return (
        int(one.min_new_tokens)
        if hasattr(one, "min_new_tokens")
        else max(0, one.min_length - width)
    )


def _plan(own: Plan, policy: Policy) -> Plan:
    """The package's tree under the policy asked for, with the exact rule that fits."""
    if policy.greedy == own.policy.greedy:
        return replace(own, policy=policy)
    return Plan(own.tree, policy)


def _prompts(input_ids: Tensor, prepared: dict[str, Any]) -> list[list[int]]:
    """Every row without its padding on the left."""
    if not input_ids.numel():
        raise InputError(
            f"input_ids has the shape {tuple(input_ids.shape)}, needs at least one token to go on "
            "from in every row"
        )
    odd = sorted(
        name for name, value in prepared.items() if name not in _READ and value is not None
    )
    if odd:
        raise InputError(
            f"{', '.join(odd)} cannot be honoured while decoding with a drafttrain package: leave "
            "it out"
        )
    for name in ("cache", "past_key_values"):
        cache = prepared.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise InputError(
                f"{name} holds tokens already; here decoding starts from the complete prompt: give "
                "only input_ids"
            )
    mask = prepared.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has the shape {tuple(mask.shape)}, needs {tuple(input_ids.shape)}"
        )
    kept = mask != 0
    if not bool(kept[:, -1].all()) or bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise InputError(
            "attention_mask hides tokens that follow visible ones: pad on the left "
            "(tokenizer.padding_side='left'); other masks cannot be honoured"
        )
    places = prepared.get("position_ids")
    if (
        places is not None
        and places.shape == input_ids.shape
        and not bool((places == kept.cumsum(-1) - 1)[kept].all())
    ):
        raise InputError("position_ids other than 0, 1, 2, ... cannot be honoured: leave them out")
    return [ids[row].tolist() for ids, row in zip(input_ids, kept, strict=True)]


def _put(streamer: Any, ids: list[int]) -> None:
    for token in ids:
        streamer.put(torch.tensor([token]))


def _answer(input_ids: Tensor, written: list[list[int]], settings: Any) -> Any:
    longest = max(map(len, written))
    pad = settings._pad_token_tensor
    filler = 0 if pad is None else int(pad.flatten()[0])
    rows = [row + [filler] * (longest - len(row)) for row in written]
    sequences = torch.cat(
        (input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)), 1
    )
    if not settings.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
