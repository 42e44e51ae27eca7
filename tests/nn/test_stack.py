"""Layers run one by one against the model's own pass; sub-layers left out against weights set to
zero; partial passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from drafttrain.errors import InputError
from drafttrain.flow import PartialPass
from drafttrain.nn.cache import KVCache
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.messages import said

LENGTHS = torch.tensor([31, 12, 26])
"""Two of them exceed the window of the sliding families."""
TREE = Tree.expansion([2, 2, 1])
MASK = TREE.ancestor_mask()[None]
DEPTHS = torch.tensor([[0, *TREE.depths]])


@pytest.fixture(scope="module", params=load.TINY)
def target(request: pytest.FixtureRequest) -> Target:
    return load.tiny(family=request.param)


def prompted(target: Target) -> KVCache:
    """Ragged rows, read by the model's own pass."""
    cache = target.new_cache(len(LENGTHS), 64)
    prompts = torch.randint(3, 320, (len(LENGTHS), 31), generator=torch.Generator().manual_seed(0))
    target.step(prompts, cache)
    cache.commit(LENGTHS)
    return cache


def new_tokens(n: int) -> Tensor:
    return torch.randint(3, 320, (len(LENGTHS), n), generator=torch.Generator().manual_seed(1))


def entries(cache: KVCache, n: int) -> list[Tensor]:
    """(b h n e) the new entries of every layer, keys then values."""
    rows = torch.arange(len(LENGTHS))[:, None]
    places = cache.lengths[:, None] + torch.arange(n)
    return [tensor[rows, :, places] for tensor in (*cache.keys, *cache.values)]


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_layers_one_by_one_are_the_models_own_pass(target: Target) -> None:
    ids, (own, ours) = new_tokens(TREE.size + 1), (prompted(target), prompted(target))
    with torch.inference_mode():
        expected = target.read(ids, own, tree_mask=MASK, depths=DEPTHS)
        stack = target.stack
        hidden = stack.embed(ids)
        inputs = stack.inputs(hidden, ours, MASK, DEPTHS)
        for step in stack.steps:
            hidden = stack.run(hidden, inputs, [step])
        close(stack.norm(hidden), expected)
    for mine, theirs in zip(entries(ours, ids.shape[1]), entries(own, ids.shape[1]), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("lacking", ["leaves", "others in each row", "none", "all but the anchor"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_partial_pass_ends_like_a_full_one(target: Target, layer: int, lacking: str) -> None:
    n = TREE.size + 1
    ids, (own, ours) = new_tokens(n), (prompted(target), prompted(target))
    inner = [-1, *sorted(set(TREE.parents) - {-1})]
    read = {
        "leaves": [inner] * 3,
        "others in each row": [[-1], inner, [-1, 1, 4, 0, 2]],
        "none": [[-1, *reversed(range(TREE.size))]] * 3,
        "all but the anchor": [[-1]] * 3,
    }[lacking]
    longest = max(map(len, read))
    # As a draft would have: tokens read in another order than the pass has them, some rows more of
    # them than others.
    order = torch.tensor(
        [[node + 1 for node in (nodes + [-1] * longest)[:longest]] for nodes in read]
    )
    places = torch.full((3, n), -1)
    for row, nodes in enumerate(read):
        for place, node in enumerate(nodes):
            places[row, node + 1] = place
    with torch.inference_mode():
        expected = target.step(ids, own, tree_mask=MASK, depths=DEPTHS, layers=(layer, 2))
        stack = target.stack
        hidden = stack.embed(ids.gather(1, order))
        wide = MASK.expand(3, -1, -1).gather(1, order[:, :, None].expand(-1, -1, n))
        real = torch.tensor([[place < len(nodes) for place in range(longest)] for nodes in read])
        tree_mask = wide.gather(2, order[:, None].expand(-1, longest, -1)) & real[
            :, None
        ] | torch.eye(longest, dtype=torch.bool)
        inputs = stack.inputs(hidden, ours, tree_mask, DEPTHS.expand(3, -1).gather(1, order))
        partial_pass = PartialPass(
            layer, stack.run(hidden, inputs, stack.steps[: layer + 1]), places
        )
        lengths = ours.lengths.tolist()
        found = target.step(
            ids, ours, tree_mask=MASK, depths=DEPTHS, layers=(layer, 2), partial_pass=partial_pass
        )
        assert ours.lengths.tolist() == lengths == LENGTHS.tolist()
    close(found.hidden, expected.hidden)
    assert found.layers.keys() == expected.layers.keys()
    for number, value in expected.layers.items():
        close(found.layers[number], value)
    for mine, theirs in zip(entries(ours, n), entries(own, n), strict=True):
        close(mine, theirs)


def test_a_layer_below_the_beginning_cannot_be_asked_for() -> None:
    target = load.tiny()
    cache = target.new_cache(1, 8)
    partial_pass = PartialPass(
        1, torch.zeros(1, 1, target.width), torch.zeros(1, 1, dtype=torch.int64)
    )
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=said("nn.layer_below")):
        target.step(
            torch.tensor([[5]]),
            cache,
            tree_mask=one,
            depths=torch.zeros(1, 1, dtype=torch.int64),
            layers=(0,),
            partial_pass=partial_pass,
        )


def silenced(family: str, attention: set[int], mlp: set[int]) -> Target:
    """The same target, its left-out sub-layers ending in products with zero."""
    target = load.tiny(family=family)
    with torch.no_grad():
        for number, layer in enumerate(target.decoder_layers):
            parts: dict[str, Any] = dict(layer.named_modules())
            ends = [
                name
                for name in parts
                if (number in attention and name in ("self_attn.o_proj", "attention.dense"))
                or (number in mlp and name in ("mlp.down_proj", "mlp.dense_4h_to_h"))
            ]
            assert len(ends) == (number in attention) + (number in mlp)
            for name in ends:
                for parameter in parts[name].parameters():
                    parameter.zero_()
    return target


@pytest.mark.parametrize(
    ("attention", "mlp"), [({1}, set()), (set(), {0, 2}), ({0, 1}, {1, 2}), ({0, 1, 2}, set())]
)
def test_what_is_left_out_adds_nothing(target: Target, attention: set[int], mlp: set[int]) -> None:
    family = target.name.removeprefix("tiny-")
    ids, cache = new_tokens(9), KVCache(3, 9)
    before = {name: id(module) for name, module in target.model.named_modules()}
    with torch.inference_mode():
        stack = target.stack
        steps = stack.without(attention, mlp)
        hidden = stack.embed(ids)
        found = stack.norm(stack.run(hidden, stack.inputs(hidden, cache), steps))
        close(
            found,
            silenced(family, attention, mlp).base(input_ids=ids, use_cache=False).last_hidden_state,
        )
    assert [step.layer for step in steps] == [
        layer for layer in range(3) if layer not in attention & mlp
    ]
    assert [len(cache.keys) > layer and bool(cache.keys[layer].any()) for layer in range(3)] == [
        layer not in attention for layer in range(3)
    ]
    assert {name: id(module) for name, module in target.model.named_modules()} == before
    mine = {p.data_ptr() for step in steps for p in step.module.parameters()}
    assert mine <= {p.data_ptr() for p in target.model.parameters()}, "nothing is copied"


def test_hooks_on_the_targets_layers_do_not_see_those_that_lack_something() -> None:
    target, seen = load.tiny(), list[int]()
    steps = target.stack.without({1}, set())
    handle = target.decoder_layers[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        hidden = target.stack.embed(torch.tensor([[5, 6]]))
        target.stack.run(hidden, target.stack.inputs(hidden, target.new_cache(1, 2)), steps)
    handle.remove()
    assert not seen


def test_sizes_are_those_of_the_parts(target: Target) -> None:
    attention, mlp = target.stack.sizes()
    for layer, one, other in zip(target.decoder_layers, attention, mlp, strict=True):
        norms = sum(p.numel() for name, p in layer.named_parameters() if "layernorm" in name)
        assert (
            one + other == sum(p.numel() for p in layer.parameters()) - norms
            and one > 0
            and other > 0
        )


def test_a_family_that_cannot_be_taken_apart_is_refused_by_name() -> None:
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_implementation="sdpa"
    )
    target = Target(GPT2LMHeadModel(config), None, "old")
    with pytest.raises(InputError, match=said("nn.not_one_by_one")):
        _ = target.stack


def test_a_part_that_adds_something_by_itself_is_refused() -> None:
    target = load.tiny()
    target.decoder_layers[1].register_forward_pre_hook(
        lambda _module, given: (given[0] + 1.0, *given[1:])
    )
    with pytest.raises(InputError, match=said("nn.not_left_out")):
        target.stack.without({1}, set())
