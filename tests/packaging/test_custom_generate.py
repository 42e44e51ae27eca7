"""transformers decodes with a package: the same tokens, or a refusal; never another text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import drafttrain
from drafttrain.decoding.plan import Plan
from drafttrain.errors import InputError
from drafttrain.packaging import hf_generate
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.helpers import tiny_tokenizer
from tests.messages import said
from tests.packaging.called import surroundings, with_package  # noqa: F401 - for every test
from tests.packaging.made import overfitted, packed

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
EOS = 1


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def package(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "package"
    return packed(folder, overfitted(target, PROMPTS), target, plan=Plan(Tree.eagle1_static()))


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved)


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def test_one_prompt_equals_plain_greedy_and_our_runtime(
    model: Any, package: Path, target: Target
) -> None:
    plain = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=40)
    ours = with_package(model, package, PROMPTS[:1], max_new_tokens=40)
    assert torch.equal(ours, plain) and ours.dtype == plain.dtype
    outputs, tally = drafttrain.load(package, target).generate(PROMPTS[:1], max_new_tokens=40)
    assert PROMPTS[0] + outputs[0].ids == ours[0].tolist()
    assert tally.tau is not None and tally.tau > 1.5, (
        "drafts must be accepted for this to show anything"
    )


def test_a_batch_with_padding_equals_plain_greedy(
    model: Any, package: Path, target: Target
) -> None:
    inputs = padded(PROMPTS)
    plain = model.generate(**inputs, max_new_tokens=30)
    ours = model.generate(
        **inputs, max_new_tokens=30, custom_generate=str(package), trust_remote_code=True
    )
    assert torch.equal(ours, plain)
    assert torch.equal(
        with_package(model, package, inputs["input_ids"], max_new_tokens=9), plain[:, : 5 + 9]
    )


def test_rows_that_end_early_are_filled_with_the_padding_id(model: Any, package: Path) -> None:
    inputs = padded(PROMPTS)
    free = model.generate(**inputs, max_new_tokens=30)
    for eos in ([int(free[0, 12])], [int(free[1, 9]), int(free[2, 20])]):
        settings: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 3}
        plain = model.generate(**inputs, **settings)
        ours = model.generate(
            **inputs, **settings, custom_generate=str(package), trust_remote_code=True
        )
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 17},
        {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=EOS, pad_token_id=0)},
        {"max_new_tokens": 1},
        {"max_new_tokens": 6, "use_cache": False},
        {"max_new_tokens": 6, "eos_token_id": None},
        {},
    ],
    ids=["max_length", "generation_config", "one token", "no cache", "no end", "defaults"],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_lengths_are_honoured(settings: dict[str, Any], model: Any, package: Path) -> None:
    plain = model.generate(torch.tensor(PROMPTS[:1]), **settings)
    assert torch.equal(with_package(model, package, PROMPTS[:1], **settings), plain)


def test_settings_of_the_model_are_honoured(model: Any, package: Path) -> None:
    model.generation_config.max_new_tokens = 8
    assert with_package(model, package, PROMPTS[:1]).shape[1] == len(PROMPTS[0]) + 8
    model.generation_config.repetition_penalty = 1.3
    assert torch.equal(
        with_package(model, package, PROMPTS[:1]), model.generate(torch.tensor(PROMPTS[:1]))
    )
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(InputError, match="NoRepeatNGramLogitsProcessor"):
        with_package(model, package, PROMPTS[:1])


def test_policies_that_read_the_text_equal_plain_greedy_in_a_batch_with_padding(
    model: Any, package: Path
) -> None:
    inputs = padded(PROMPTS)
    free = model.generate(**inputs, max_new_tokens=20)
    eos = [int(free[0, 8]), int(free[1, 9])]
    for settings in (
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12},
        {"min_length": 17},
        {"sequence_bias": [[[int(free[2, 7])], -3.0]]},
        {
            "repetition_penalty": 0.9,
            "min_new_tokens": 5,
            "sequence_bias": [[[eos[0]], -4.0], [[4], 1.0]],
        },
    ):
        more: dict[str, Any] = {
            "max_new_tokens": 20,
            "eos_token_id": eos,
            "pad_token_id": 3,
            **settings,
        }
        plain = model.generate(**inputs, **more)
        ours = model.generate(
            **inputs, **more, custom_generate=str(package), trust_remote_code=True
        )
        assert torch.equal(ours, plain), settings
    torch.manual_seed(0)
    drawn = model.generate(
        **inputs,
        do_sample=True,
        num_return_sequences=2,
        max_new_tokens=8,
        min_p=1.0,
        repetition_penalty=1.3,
        top_k=None,
        custom_generate=str(package),
        trust_remote_code=True,
    )
    assert torch.equal(drawn[::2], drawn[1::2])
    assert torch.equal(
        drawn[::2], model.generate(**inputs, max_new_tokens=8, repetition_penalty=1.3)
    )


def test_sampling_follows_the_seed_and_the_policy(model: Any, package: Path) -> None:
    def draw(seed: int, **settings: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return with_package(
            model, package, PROMPTS[:1], do_sample=True, max_new_tokens=10, **settings
        ).tolist()

    several = draw(0, num_return_sequences=3, temperature=1.2)
    assert len(several) == 3 and len({tuple(row) for row in several}) == 3
    assert (
        several
        == draw(0, num_return_sequences=3, temperature=1.2)
        != draw(1, num_return_sequences=3, temperature=1.2)
    )
    plain = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=10).tolist()
    assert draw(2, top_k=1) == plain and draw(3, top_p=1e-6) == plain


def test_a_streamer_gets_every_token_once_and_in_order(model: Any, package: Path) -> None:
    class Ears(BaseStreamer):
        def __init__(self) -> None:
            self.heard: list[list[int]] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.heard.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    theirs, ours = Ears(), Ears()
    model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, streamer=theirs)
    with_package(model, package, PROMPTS[:1], max_new_tokens=12, streamer=ours)
    assert ours.heard == theirs.heard and ours.ended == theirs.ended == 1
    with pytest.raises(InputError, match=said("packaging.streamer")):
        with_package(model, package, PROMPTS[:1] * 2, max_new_tokens=3, streamer=Ears())


def test_an_output_object_on_demand(model: Any, package: Path) -> None:
    found = with_package(
        model, package, PROMPTS[:1], max_new_tokens=5, return_dict_in_generate=True
    )
    assert torch.equal(found.sequences, model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=5))


class Louder(transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2


REFUSED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 3},
    "prompt_ignore_length": {
        "logits_processor": transformers.LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)]
        )
    },
    "another prompt length": {
        "logits_processor": transformers.LogitsProcessorList(
            [MinNewTokensLengthLogitsProcessor(1, 3, [EOS])]
        )
    },
    "in the order": {
        "logits_processor": transformers.LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor({(5,): 2.0})]
        )
    },
    "NoRepeatNGram": {"no_repeat_ngram_size": 2},
    "NoBadWords": {"bad_words_ids": [[5]]},
    "other stop tokens": {
        "logits_processor": transformers.LogitsProcessorList(
            [MinLengthLogitsProcessor(9, [EOS + 1])]
        )
    },
    "Typical": {"do_sample": True, "typical_p": 0.5},
    "ForcedEOS": {"forced_eos_token_id": 1},
    "SuppressTokens": {"suppress_tokens": [4]},
    "sequence_bias of": {"sequence_bias": [[[5, 6], 2.0]]},
    "ClassifierFree": {"guidance_scale": 2.0},
    "PrefixConstrained": {"prefix_allowed_tokens_fn": lambda batch, ids: [4]},
    "Louder": {"logits_processor": transformers.LogitsProcessorList([Louder()])},
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": object()},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[3]])},
    "synced_gpus": {"synced_gpus": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 64)},
    "position_ids": {"position_ids": torch.tensor([[4, 5, 6]])},
    "pad on the left": {"attention_mask": torch.tensor([[1, 1, 0]])},
    "hides tokens that follow": {"attention_mask": torch.tensor([[1, 0, 1]])},
    "context of 512": {"max_new_tokens": 600},
    "quantiz": {"cache_implementation": "quantized"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_honoured_is_refused(reason: str, model: Any, package: Path) -> None:
    settings = {"max_new_tokens": 4} | REFUSED[reason]
    with pytest.raises((InputError, ValueError, ImportError), match=reason):
        with_package(model, package, PROMPTS[:1], **settings)


STRINGS: dict[str, Any] = {
    "one": lambda text: [text[5:8]],
    "several": lambda text: ["never", text[7:8], text[3:6]],
    "across tokens": lambda text: [text[4:12]],
    "at the start": lambda text: [text[:2]],
    "never": lambda text: ["no such text"],
}


# F86 stands for every way to set stop strings: by the call, by its generation config, by the
# model's own; one text or several with padding; greedy or sampled; streamed.
@pytest.mark.field("F86")
@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
@pytest.mark.parametrize("way", ["call", "config", "model"])
def test_stop_strings_end_a_text_where_they_end_plain_decoding(
    model: Any, package: Path, strings: Any, way: str
) -> None:
    tokenizer = tiny_tokenizer()
    free = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=24)[0, 3:]
    stop = strings(tokenizer.decode(free))
    common: dict[str, Any] = {"max_new_tokens": 24, "tokenizer": tokenizer}
    if way == "call":
        common["stop_strings"] = stop
    elif way == "config":
        common["generation_config"] = GenerationConfig(
            max_new_tokens=24, stop_strings=stop, eos_token_id=EOS, pad_token_id=0
        )
        del common["max_new_tokens"]
    else:
        model.generation_config.stop_strings = stop
    for prompts in (PROMPTS[:1], PROMPTS):
        inputs = {**padded(prompts), **common}
        plain = model.generate(**inputs)
        ours = model.generate(**inputs, custom_generate=str(package), trust_remote_code=True)
        assert torch.equal(ours, plain)
    assert "_get_stopping_criteria" not in vars(model), "the caller's model is as it was"


@pytest.mark.field("F86")
def test_stop_strings_without_a_tokenizer_are_refused_as_in_plain_decoding(
    model: Any, package: Path
) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        with_package(model, package, PROMPTS[:1], max_new_tokens=4, stop_strings=["a"])


def test_stopping_criteria_end_a_text_where_they_end_plain_decoding(
    model: Any, package: Path
) -> None:
    """In the midst of accepted drafts too, in each row of a batch by itself."""
    inputs = padded(PROMPTS)
    free = model.generate(**inputs, max_new_tokens=30)[:, 5:]
    for place in range(12):
        wanted = free[:, place]

        def seen(ids: torch.Tensor, scores: Any, wanted: torch.Tensor = wanted) -> torch.Tensor:
            late = torch.tensor([len(row) > 9 for row in ids])
            return (
                torch.isin(ids[:, -1], wanted) & late & (ids[:, 4] != PROMPTS[0][-1])
            )  # The first row's text goes on.

        settings: dict[str, Any] = {
            "max_new_tokens": 30,
            "stopping_criteria": StoppingCriteriaList([seen]),
            "pad_token_id": 3,
        }
        plain = model.generate(**inputs, **settings)
        ours = model.generate(
            **inputs, **settings, custom_generate=str(package), trust_remote_code=True
        )
        assert torch.equal(ours, plain), place
        assert (plain[1:, -1] == 3).any(), "a text must end for this to show anything"


def test_a_time_that_is_up_ends_a_text(model: Any, package: Path) -> None:
    ours = with_package(model, package, PROMPTS[:1], max_new_tokens=40, max_time=1e-9)
    assert ours.shape[1] == len(PROMPTS[0]) + 1
    assert (
        with_package(model, package, PROMPTS[:1], max_new_tokens=9, max_time=60.0).shape[1]
        == len(PROMPTS[0]) + 9
    )


@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (0, 3)], ids=str)
def test_a_prompt_of_nothing_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"input_ids has the shape"):
        hf_generate._prompts(torch.zeros(shape, dtype=torch.int64), {})


def test_an_empty_prompt_is_refused_in_a_call(model: Any, package: Path) -> None:
    with pytest.raises(InputError, match=r"input_ids has the shape"):
        with_package(model, package, torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=3)


def test_a_misspelt_setting_is_refused(model: Any, package: Path) -> None:
    with pytest.raises(ValueError, match="max_new_token"):
        with_package(model, package, PROMPTS[:1], max_new_token=4)


def test_a_cache_that_holds_tokens_is_refused(model: Any, package: Path) -> None:
    read = model(torch.tensor([[5, 6]]), use_cache=True)
    cache = getattr(read, "cache", None) or read.past_key_values
    with pytest.raises((InputError, ValueError), match=said("packaging.holds_tokens")):
        with_package(model, package, PROMPTS[:1], past_key_values=cache, max_new_tokens=3)


def test_without_trust_nothing_runs(model: Any, package: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(
            torch.tensor(PROMPTS[:1]),
            custom_generate=str(package),
            trust_remote_code=False,
            max_new_tokens=3,
        )


def test_the_model_is_given_back_as_it_came(model: Any, package: Path) -> None:
    model.train()
    model.model.norm.weight.requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with_package(model, package, PROMPTS[:1], max_new_tokens=4)
    assert all(module.training for module in model.modules())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    with pytest.raises(InputError):
        with_package(model, package, PROMPTS[:1], max_new_tokens=4, num_beams=2)
    assert model.training


def test_the_package_is_read_once_and_again_when_it_changed(
    model: Any, package: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    real = hf_generate.load
    monkeypatch.setattr(hf_generate, "load", lambda *given: reads.append(given[0]) or real(*given))
    folder = packed(tmp_path / "package", overfitted(target, PROMPTS[:1], steps=1), target)
    for _ in range(2):
        with_package(model, folder, PROMPTS[:1], max_new_tokens=3)
    assert len(reads) == 1
    with_package(model, package, PROMPTS[:1], max_new_tokens=3)
    assert len(reads) == 2, "another package of the same name and code is another package"
    packed(folder, overfitted(target, PROMPTS[:1], steps=2), target)
    with_package(model, folder, PROMPTS[:1], max_new_tokens=3)
    assert len(reads) == 3


def test_a_model_of_other_weights_is_refused(package: Path) -> None:
    with pytest.raises(InputError, match=said("packaging.another_target")):
        with_package(load.tiny(seed=2).model, package, PROMPTS[:1], max_new_tokens=3)


def test_the_code_in_a_package_is_the_code_of_drafttrain(
    model: Any, package: Path, tmp_path: Path
) -> None:
    """The folder that a call names is the one that is read; without one it must be named."""
    ids = torch.tensor(PROMPTS[:1])
    named = hf_generate.generate(model, package=package, inputs=ids, max_new_tokens=5)
    assert torch.equal(named, model.generate(ids, max_new_tokens=5))
    with pytest.raises(InputError, match=said("packaging.ask_for_folder")):
        hf_generate.generate(model, inputs=ids, max_new_tokens=5)
    assert json.loads((package / "config.json").read_text())["format"] == 1
