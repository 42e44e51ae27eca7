"""A target tried as it will be used: what it is limited to, and what is refused in which words.

F70's kind: whatever makes one token's keys depend on how much else is read. Tried: longrope in both
spellings and one for each kind of layer, dynamic NTK at the end of its context, a table of unknown
make. F87's and F100's: whatever a mask and positions for each token do not reach. Tried: alibi
(Bloom, MPT, Falcon), windows over cache entries (GPT-Neo, long and short), chunks (Llama-4), an
attention that only one backend computes, a window that the family does not read, weights that are
not finite.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn import probing
from drafttrain.nn.probing import reaches
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter.make import make
from tests.families import model_of
from tests.messages import said

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ORIGINAL = {"original_max_position_embeddings": 64}


def longrope(form: str) -> Target:
    if form == "phi3":
        scaling = {**LONGROPE, "type": "longrope"}
        return Target(
            model_of(
                "phi3", "sdpa", hidden_size=64, rope_scaling=scaling, pad_token_id=0, **ORIGINAL
            ),
            None,
            "old",
        )
    return load.tiny(rope_parameters={**LONGROPE, **ORIGINAL, "rope_theta": 1e4})


@pytest.mark.field("F70")
@pytest.mark.parametrize("form", ["llama", "phi3"])
def test_tables_of_the_length_read_limit_a_target_to_its_first_one(form: str) -> None:
    """50 tokens and 60 new ones: the text ends at 64, is plain decoding's for each row by itself,
    and a neighbour changes nothing."""
    target = longrope(form)
    assert target.context == 64 and "64 (its longrope" in target.context_words
    assert "of the 512" in target.context_words
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (50, 40)]
    torch.manual_seed(0)
    drafter = make(Eagle1, target).eval()
    limits: dict[str, Any] = {"max_new_tokens": 60, "stop_ids": ()}
    plain = [
        decode(target, None, [prompt], Plan(Tree.chain(0)), **limits)[0][0] for prompt in prompts
    ]
    assert [(len(one.ids), one.finish) for one in plain] == [(14, "context"), (24, "context")]
    for tree in (Tree.chain(4), Tree.expansion([3, 2])):
        together, _ = decode(target, drafter, prompts, Plan(tree), **limits)
        assert [one.ids for one in together] == [one.ids for one in plain]
    rows = torch.randint(3, 97, (2, 64), generator=generator)
    needs = Needs(last_hidden=True)
    both = target.features(rows, torch.tensor([64, 20]), needs).last_hidden
    short = target.features(rows[1:, :20], torch.tensor([20]), needs).last_hidden
    assert both is not None and short is not None
    torch.testing.assert_close(both[1:, :20], short, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"context holds 64 \(its longrope"):
        decode(target, None, [[5] * 64], Plan(Tree.chain(0)), max_new_tokens=1)


@pytest.mark.field("F70")
def test_padding_past_the_first_table_changes_nothing() -> None:
    """A batch padded beyond the context is read as one within it."""
    target = longrope("llama")
    rows = torch.randint(3, 320, (1, 70), generator=torch.Generator().manual_seed(1))
    needs, lengths = Needs(last_hidden=True), torch.tensor([50])
    padded = target.features(rows, lengths, needs).last_hidden
    exact = target.features(rows[:, :50], lengths, needs).last_hidden
    assert padded is not None and exact is not None
    torch.testing.assert_close(padded[:, :50], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.field("F70")
def test_each_kind_of_layer_may_have_its_own_table() -> None:
    """The shortest counts; tables that are the same for every length do not."""
    rope = {
        "full_attention": {**LONGROPE, **ORIGINAL, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert Target(gemma3(rope), None, "old").context == 64
    static = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
    assert load.tiny(rope_parameters=static).context == 512


def gemma3(rope: dict[str, Any]) -> Any:
    return model_of("gemma3_text", "sdpa", head_dim=16, sliding_window=24, rope_parameters=rope)


@pytest.mark.field("F70")
def test_a_table_that_grows_is_never_grown_by_drafts() -> None:
    """Dynamic NTK: a row near the end of the context is drafted as deep as its neighbour. Drafts
    past the end must not change the table of either."""
    dynamic = {"rope_type": "dynamic", "factor": 40.0, "rope_theta": 1e4}
    target = load.tiny(rope_parameters=dynamic, max_position_embeddings=48)
    torch.manual_seed(0)
    drafter = make(Eagle1, target).eval()
    read = list[int]()
    target.base.rotary_emb.register_forward_hook(
        lambda *_: read.append(int(target.base.rotary_emb.max_seq_len_cached))
    )
    prompts = [list(range(3, 43)), list(range(3, 23))]
    limits: dict[str, Any] = {"max_new_tokens": 60, "stop_ids": ()}
    texts = [
        [one.ids for one in decode(target, drafter, prompts, Plan(tree), **limits)[0]]
        for tree in (Tree.chain(0), Tree.chain(5))
    ]
    assert [len(ids) for ids in texts[0]] == [8, 28] and texts[0] == texts[1]
    assert set(read) == {48}


@pytest.mark.field("F70")
def test_a_table_of_unknown_make_is_refused() -> None:
    model = load.tiny().model
    rotary = model.base_model.rotary_emb
    plain = rotary.forward

    def by_length(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = plain(x, position_ids)
        scale = 1.0 if int(position_ids.max()) < 100 else 0.5
        return cos * scale, sin * scale

    rotary.forward = by_length
    with pytest.raises(InputError, match=said("nn.rotary_of_length")):
        Target(model, None, "old")


@pytest.mark.field("F87")
@pytest.mark.parametrize(("family", "fault"), [("bloom", "counts"), ("mpt", "counts")])
def test_a_family_without_positions_is_refused_in_one_line(family: str, fault: str) -> None:
    with pytest.raises(InputError, match=said("nn.not_represented")) as caught:
        Target(model_of(family), None, "old")
    message = str(caught.value)
    assert "attention=eager" not in message and "\n" not in message
    assert caught.match(said("nn.counts_positions"))


@pytest.mark.field("F87")
def test_alibi_and_chunks_are_refused_for_what_they_are() -> None:
    with pytest.raises(InputError, match=said("nn.not_represented") + ".*it is not supported"):
        Target(model_of("falcon", "sdpa", alibi=True), None, "old")
    llama4 = {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 2}
    with pytest.raises(InputError, match="layers of type chunked_attention"):
        Target(model_of("llama4_text", "sdpa", head_dim=8, **llama4), None, "old")


@pytest.mark.field("F87")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named_as_such(dtype: torch.dtype) -> None:
    model = load.tiny().model.to(dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(InputError, match=said("nn.damaged")):
        Target(model, None, "old")


@pytest.mark.field("F71")
def test_a_token_that_a_head_rules_out_is_no_fault() -> None:
    model = load.tiny().model
    head = torch.nn.Linear(64, 320)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[300:] = -torch.inf
    model.lm_head = head
    Target(model, None, "without spare ids")
    with torch.no_grad():
        head.bias[7] = torch.inf
    with pytest.raises(InputError, match=said("nn.damaged_head")):
        Target(model, None, "with infinity")


@pytest.mark.field("F87")
def test_another_backend_is_advised_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that reads only the first row's mask."""
    real = torch.nn.functional.scaled_dot_product_attention

    def first_mask(*given: Any, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        if attn_mask is not None and attn_mask.shape[0] > 1:
            attn_mask = attn_mask[:1].expand_as(attn_mask)
        return real(*given, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", first_mask)
    with pytest.raises(InputError, match=said("nn.backend")):
        load.tiny()
    assert load.tiny(attention="eager").attention == "eager"


def gpt_neo(*kinds: str, window: int = 16) -> Any:
    more: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "max_position_embeddings": 4096}
    return model_of("gpt_neo", attention_types=[[[*kinds], 1]], window_size=window, **more)


@pytest.mark.field("F100")
def test_windows_that_are_counted_over_entries_are_refused() -> None:
    """GPT-Neo's local layers; those that are all global are used."""
    with pytest.raises(InputError, match=said("nn.unknown_window")):
        Target(gpt_neo("global", "local"), None, "old")
    assert reaches(Target(gpt_neo("global", "global"), None, "old")) == {"window_size": 16}


@pytest.mark.field("F100")
def test_a_window_too_long_to_be_tried_is_refused_unless_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drafttrain.nn.probing._WORK", {"cpu": 1e8})
    with pytest.raises(InputError, match=said("nn.unknown_long_window")):
        Target(gpt_neo("global", "local", window=2048), None, "old")
    long: dict[str, Any] = {"sliding_window": 2048, "max_position_embeddings": 4096}
    assert set(load.tiny(family="mistral", **long).windows) == {2048}


@pytest.mark.field("F100")
def test_windows_are_passed_and_rows_are_unlike() -> None:
    """A mask that counts entries of the cache in place of positions is found, and so is one that
    forgets the window."""

    class Entries(Target):
        def _masks(self, cache: Any, tree_mask: Tensor, positions: Tensor) -> Any:
            places = torch.arange(positions.shape[1], device=positions.device)
            return super()._masks(
                cache, tree_mask, cache.longest + places[None].expand_as(positions)
            )

    class Full(Target):
        def _masks(self, cache: Any, tree_mask: Tensor, positions: Tensor) -> Any:
            return self.as_attention(cache.mask(tree_mask))

    model = load.tiny(family="mistral").model
    assert reaches(Target(model, None, "old")) == {"sliding_window": 24}
    for wrong in (Entries, Full):
        with pytest.raises(InputError, match=said("nn.not_represented")):
            wrong(model, None, "old")


MIXED = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 16, "num_key_value_heads": 4}


@pytest.mark.field("F100")
@pytest.mark.parametrize(
    "more", [{}, {"layer_types": ["sliding_attention"] * 2}, {"layer_types": MIXED}]
)
def test_a_window_that_the_family_does_not_read_is_none(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Mistral that was written down as a Llama; the window is too long to be tried."""
    monkeypatch.setattr(probing, "_WORK", {"cpu": 0})
    target = Target(model_of("llama", "sdpa", **WINDOW, **more), None, "t")
    ids = torch.arange(3, 63)[None] * 7 % 97
    with torch.inference_mode():
        own = target.model(input_ids=ids, use_cache=False).logits
        hidden = target.read(ids, target.new_cache(1, 64))
        torch.testing.assert_close(target.head(hidden), own, rtol=1e-4, atol=1e-4)
    assert set(target.windows) == {None}
    assert set(Target(model_of("mistral", "sdpa", **WINDOW), None, "t").windows) == {16}
