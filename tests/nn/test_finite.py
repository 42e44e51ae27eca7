"""Values that are not finite end a run, wherever they are met, with the place they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from drafttrain.data.shapes import Prompt
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import measure_acceptance, measure_speed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Needs
from drafttrain.nn import finite, losses, probing
from drafttrain.nn.sampling import Policy
from drafttrain.packaging import hf_generate
from drafttrain.target import load
from drafttrain.target.features import LiveFeatures, computed
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.families import model_of
from tests.helpers import tiny_chat_target
from tests.messages import said
from tests.packaging.made import packed
from tests.target.test_synthesis import written

# F71 stands for every way in which a target, or a drafter, gives NaN or infinite values: an
# overflow of float16 at one token of the prompt, of the answer, of a draft or of what fills up a
# shorter prompt; in a layer or in the head; damaged weights in any dtype; at every temperature,
# with trees of every kind and without drafts, under a policy that processes logits; and in every
# way to use a target. -inf rules a token out, and is no fault.
BAD = 7
PROMPTS = [[3, 4, 5], [3, BAD, 5, 4, 2, 6]]
LAYER = rf"prompt 1, position 1 \(token {BAD}\), first in layer 1; {said('nn.half')}"


def overflowing(target: Target, token: int = BAD, layer: int = 1) -> Target:
    """A product inside one layer exceeds float16 at one token, and nowhere else: only that token
    has something in the first dimension of the residual stream."""
    with torch.no_grad():
        target.embedding.weight[:, 0] = 0
        target.embedding.weight[token, 0] = 30
        for block in target.decoder_layers:
            block.self_attn.o_proj.weight[0] = 0  # type: ignore[union-attr, index]
            block.mlp.down_proj.weight[0] = 0  # type: ignore[union-attr, index]
        mlp: Any = target.decoder_layers[layer].mlp
        mlp.gate_proj.weight[:, 0] = mlp.up_proj.weight[:, 0] = 200
    return target


@pytest.fixture(scope="module")
def half() -> Target:
    return overflowing(load.tiny(dtype="float16"))


@pytest.fixture(scope="module")
def drafter(half: Target) -> Drafter:
    torch.manual_seed(0)
    return drafters.make(Eagle1, half).eval()


PLANS = {
    "plain": Plan(Tree.chain(0)),
    "chain": Plan(Tree.chain(3)),
    "tree": Plan(Tree.expansion([2, 2])),
    "dynamic": Plan(Dynamic(depth=2, top_k=2, total=4)),
    "sampled plainly": Plan(Tree.chain(0), Policy(1.0)),
    "sampled chain": Plan(Tree.chain(3), Policy(1.0)),
    "sampled tree": Plan(Tree.expansion([2, 2]), Policy(0.7, 5, 0.9)),
    "processed": Plan(Tree.chain(3), Policy(repetition_penalty=1.2)),
}


@pytest.mark.field("F71")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_overflow_in_a_prompt_ends_decoding(half: Target, drafter: Drafter, plan: Plan) -> None:
    given = drafter if plan.tree.size else None
    seen: list[int] = []
    with pytest.raises(InputError, match=LAYER):
        decode(
            half, given, PROMPTS, plan, max_new_tokens=4, listener=lambda row, *_: seen.append(row)
        )
    assert not seen, "nothing is written, so nothing is counted"
    decode(half, given, PROMPTS[:1], plan, max_new_tokens=4)


@pytest.mark.field("F71")
@pytest.mark.parametrize("plan", [PLANS["plain"], PLANS["sampled plainly"]], ids=["0", "1"])
def test_an_overflow_in_an_answer_ends_decoding(half: Target, plan: Plan) -> None:
    policy = Policy(plan.policy.temperature, logit_bias={BAD: 1e4})
    with pytest.raises(InputError, match=rf"prompt 0 with its answer, position 3 \(token {BAD}\)"):
        decode(half, None, PROMPTS[:1], Plan(plan.tree, policy), max_new_tokens=4)
    # Chosen last, it is never read.
    assert decode(half, None, PROMPTS[:1], Plan(plan.tree, policy), max_new_tokens=1)[0][0].ids == [
        BAD
    ]


@pytest.mark.field("F71")
def test_an_overflow_in_a_draft_ends_decoding(
    half: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = drafter.propose

    def propose(*given: Any) -> Any:
        found = inner(*given)
        found.tokens[:, 1] = BAD
        return found

    monkeypatch.setattr(drafter, "propose", propose)
    with pytest.raises(
        InputError, match=r"with its answer, a draft after it, position 5 .* layer 1"
    ):
        decode(half, drafter, PROMPTS[:1], PLANS["chain"], max_new_tokens=6)


@pytest.mark.field("F71")
def test_what_fills_up_a_shorter_prompt_cannot_overflow() -> None:
    target = overflowing(load.tiny(dtype="float16"), token=0)
    prompts, plan = [[3, 4], [5, 6, 8, 9, 10, 11]], PLANS["plain"]
    together = decode(target, None, prompts, plan, max_new_tokens=2)[0]
    for prompt, one in zip(prompts, together, strict=True):
        assert decode(target, None, [prompt], plan, max_new_tokens=2)[0][0].ids == one.ids


def _custom_generate(target: Target, drafter: Drafter, folder: Path) -> None:
    packed(folder / "package", drafter, target)
    target.model.save_pretrained(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float16)
    hf_generate.generate(
        model, package=folder / "package", inputs=torch.tensor(PROMPTS[1:]), max_new_tokens=3
    )


def _batch() -> Batch:
    ids = torch.tensor([[*PROMPTS[0], 0, 0, 0], PROMPTS[1]])
    return Batch(ids, torch.ones_like(ids).bool(), torch.tensor([3, 6]), torch.tensor([4, 9]))


def _stream(target: Target, drafter: Drafter) -> None:
    list(Speculator(target, drafter, PLANS["chain"]).stream(PROMPTS[1], max_new_tokens=3))


LIMIT = {"max_new_tokens": 4}
USES: dict[str, tuple[Callable[[Target, Drafter, Path], Any], str]] = {
    "evaluate": (lambda t, d, _: measure_acceptance(t, d, PROMPTS, PLANS["chain"], **LIMIT), LAYER),
    "speed": (lambda t, d, _: measure_speed(t, d, PROMPTS, [PLANS["chain"]], **LIMIT), LAYER),
    "Speculator": (lambda t, d, _: _stream(t, d), LAYER.replace("prompt 1", "prompt 0")),
    "custom_generate": (_custom_generate, LAYER.replace("prompt 1", "prompt 0")),
    "features": (
        lambda t, d, _: computed(t, _batch(), Needs(last_hidden=True)),
        LAYER.replace("prompt 1", "row 9 of the set"),
    ),
    "features of a target that is trained": (
        lambda t, d, _: LiveFeatures(t, Needs(last_hidden=True)).features(_batch()),
        LAYER.replace("prompt 1", "row 9 of the set"),
    ),
    "a layer's features": (
        lambda t, d, _: computed(t, _batch(), Needs(layers=(1,))),
        LAYER.replace("prompt 1", "row 9 of the set"),
    ),
}


@pytest.mark.field("F71")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("use", "words"), USES.values(), ids=USES)
def test_an_overflow_ends_every_use_of_a_target(
    half: Target,
    drafter: Drafter,
    tmp_path: Path,
    use: Callable[[Target, Drafter, Path], Any],
    words: str,
) -> None:
    with pytest.raises(InputError, match=words):
        use(half, drafter, tmp_path)


@pytest.mark.field("F71")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflow_ends_synthesis(tmp_path: Path, temperature: float) -> None:
    target = tiny_chat_target(dtype="float16")
    (word,) = target.tokenizer("q", add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    overflowing(target, word)
    with pytest.raises(InputError, match=rf"row 1, position \d+ \(token {word}\).* layer 1; float"):
        written(target, [Prompt(("an",)), Prompt(("a q",))], tmp_path, temperatures=[temperature])


@pytest.mark.field("F71")
def test_at_loading_the_cause_is_found_out() -> None:
    """No attention backend is blamed for what a layer or the files give."""
    damaged = load.tiny()
    with torch.no_grad():
        damaged.decoder_layers[2].mlp.up_proj.weight[3, 3] = float("nan")  # type: ignore[union-attr, index]
    with pytest.raises(InputError, match=r"layer 2; weights of layer 2 are not finite: get"):
        Target(damaged.model, None, "damaged")
    scaled = load.tiny(dtype="float16")
    with torch.no_grad():
        scaled.output.weight.fill_(60000)
    with pytest.raises(InputError, match=rf"first in the head; {said('nn.half')}"):
        Target(scaled.model, None, "scaled")


@pytest.mark.field("F71")
def test_the_first_token_and_part_are_found() -> None:
    text = list(range(10, 40))
    for token, layer in ((10, 0), (25, 1), (39, 2)):
        target = overflowing(load.tiny(dtype="float16"), token, layer)
        found = finite.trace(target, text)
        assert found == finite.Origin(token - 10, token, f"layer {layer}", False)
    target = load.tiny()
    assert finite.trace(target, text) is None
    with torch.no_grad():
        target.embedding.weight[17, 2] = float("inf")
    assert finite.trace(target, text) == finite.Origin(7, 17, "the embedding", True)
    assert finite.trace(target, text[:7]) is None


@pytest.mark.field("F71")
@pytest.mark.parametrize("row", [0, 1])
def test_at_loading_the_head_is_looked_at_for_every_token(row: int) -> None:
    """Of any row that is tried, not only for its last token."""
    target = load.tiny(dtype="float16")
    ids, ends = probing._texts(target, *probing._lengths(target))
    place, read = ends[row] // 2, target.full_pass(ids).float()
    own, every = read[row, place], torch.cat([read[i, :end] for i, end in enumerate(ends)])
    others = every[(every != own).any(-1)]
    # Only after that token does it exceed float16.
    way = own - torch.linalg.lstsq(others.T, own[:, None]).solution[:, 0] @ others
    with torch.no_grad():
        target.output.weight[BAD] = 1e6 / own.norm() ** 2 * (way / way.norm() * own.norm())
    words = rf"position {place} \(token {int(ids[row, place])}\), first in the head"
    with pytest.raises(InputError, match=words):
        Target(target.model, None, "scaled")


# The kind: a cap on logits makes infinite ones finite. Drafters borrow the head with it, trees are
# checked by it, and at loading the model's own pass hides what ours shows. -inf stays what the cap
# makes of it: a token of the least probability.
@pytest.mark.field("F71")
@pytest.mark.parametrize("plan", [PLANS["plain"], PLANS["sampled plainly"], PLANS["tree"]])
def test_a_soft_cap_hides_no_overflow(plan: Plan) -> None:
    target = load.tiny(family="gemma2", dtype="float16", tie_word_embeddings=False)
    torch.manual_seed(0)
    drafter = drafters.make(Eagle1, target).eval() if plan.tree.size else None
    hidden = target.full_pass(torch.tensor(PROMPTS[:1]))[0, -1]
    with torch.no_grad():
        target.output.weight[BAD] = 60000 * hidden.sign()  # Of one token, the best one.
    words = rf"position 2 \(token 5\), first in the head; {said('nn.half')}"
    with pytest.raises(InputError, match=words):
        decode(target, drafter, PROMPTS[:1], plan, max_new_tokens=2)
    with torch.no_grad():
        target.output.weight.fill_(60000)
    with pytest.raises(InputError, match=rf"first in the head; {said('nn.half')}"):
        Target(target.model, None, "scaled")


@pytest.mark.field("F71")
def test_a_soft_cap_leaves_other_logits_as_the_model_has_them() -> None:
    target = load.tiny(family="gemma2")
    ids = torch.tensor(PROMPTS[1:])
    assert torch.equal(target.head(target.full_pass(ids)), target.model(ids).logits)
    low = torch.tensor([-torch.inf, -1e30, 0, 1e30])
    assert target.finish_logits(low).tolist() == [-30, -30, 0, 30]


# The kind: advice to load in another dtype, or to try another backend, where weights are damaged.
# Any part may hold them, in a layer or outside of all, as a weight or a buffer; on a CPU the pass
# without a mask steps over some, and a text may touch none.
DAMAGE: dict[str, tuple[Callable[[Target], Tensor], str]] = {
    "the final norm": (lambda t: t.base.norm.weight, "the final norm"),
    "a query, infinite": (lambda t: t.base.layers[1].self_attn.q_proj.weight, "layer 1"),
    "a key": (lambda t: t.base.layers[2].self_attn.k_proj.weight, "layer 2"),
    "frequencies": (lambda t: t.base.rotary_emb.inv_freq, "the part rotary_emb"),
    "the head": (lambda t: t.output.weight, "the head"),
}


@pytest.mark.field("F71")
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_are_named_wherever_they_are(name: str) -> None:
    target, (weight, part) = load.tiny(), DAMAGE[name]
    with torch.no_grad():
        weight(target).view(-1)[0] = float("inf" if "inf" in name else "nan")
    words = rf"first in {part}; weights of {part} are not finite: get its files again"
    with pytest.raises(InputError, match=words):
        decode(target, None, PROMPTS, PLANS["plain"], max_new_tokens=2)
    with pytest.raises(InputError, match=words):
        Target(target.model, None, "damaged")


@pytest.mark.field("F71")
def test_tables_of_positions_are_parts_too() -> None:
    sizes: Any = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    target = Target(AutoModelForCausalLM.from_config(config), None, "gpt2")
    with torch.no_grad():
        target.base.wpe.weight[3, 0] = float("nan")
    assert finite.trace(target, [5, 6, 7, 8, 9]) == finite.Origin(3, 8, "the part wpe", True)
    assert finite.trace(target, [5, 6, 7]) is None


@pytest.mark.field("F71")
def test_where_no_text_shows_it_weights_are_looked_at() -> None:
    target = load.tiny()
    assert finite.spoilt_weights(target) == []
    assert said("nn.again") in str(finite.fault(target, PROMPTS[0], "prompt 0"))
    target.base.register_buffer("mask", torch.tensor([0, -torch.inf]))
    assert finite.spoilt_weights(target) == [], "a mask"
    with torch.no_grad():
        target.embedding.weight[BAD] = torch.nan  # Of a token that this text does not have.
    found = str(finite.fault(target, PROMPTS[0], "prompt 0"))
    assert "model.embed_tokens.weight of its weights are not finite: get its files again" in found


@pytest.mark.field("F71")
def test_a_mask_in_a_layer_that_overflows_is_no_damage() -> None:
    target = overflowing(load.tiny(dtype="float16"))
    target.decoder_layers[1].register_buffer("mask", torch.tensor([0, -torch.inf]))
    found = finite.trace(target, PROMPTS[1])
    assert found == finite.Origin(1, BAD, "layer 1", damaged=False)
    assert said("nn.half") in str(finite.fault(target, PROMPTS[1], "prompt 1"))


@pytest.mark.field("F71")
def test_a_drafter_is_given_advice_that_can_help() -> None:
    drafter = drafters.make(Medusa, load.tiny()).eval()
    wide, half = (
        str(finite.drafter_fault(drafter, dtype, "prompt 0"))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert "too large; get the package again" in wide and "dtype" not in wide
    assert "too large for bfloat16; decode with dtype=float32, get" in half
    assert "too large;" in str(finite.drafter_fault(object(), None, "prompt 0"))
    name, weight = next(iter(drafter.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    found = str(finite.drafter_fault(drafter, torch.bfloat16, "prompt 0"))
    assert f"{name} of its weights are not finite: get the package" in found
    assert "dtype=" not in found


@pytest.mark.field("F71")
def test_a_token_that_is_ruled_out_is_no_fault() -> None:
    target = load.tiny()
    inner = target.finish_logits
    target.finish_logits = lambda logits: inner(logits).index_fill(  # type: ignore[method-assign]
        -1, torch.tensor([0, 5]), -torch.inf
    )
    for policy in (Policy(), Policy(1.0)):
        ids = decode(target, None, PROMPTS, Plan(Tree.chain(0), policy), max_new_tokens=8)[0]
        assert not {0, 5} & {token for output in ids for token in output.ids}


@pytest.mark.field("F71")
@pytest.mark.parametrize("kind", [Eagle1, Medusa])
def test_a_token_that_is_ruled_out_spoils_no_training(kind: type[Drafter]) -> None:
    """By the bias of the head, as where a vocabulary is filled up; 0 times -inf is NaN."""
    model = model_of("phi", num_key_value_heads=4, partial_rotary_factor=0.5)
    found = []
    for low in (-torch.inf, -1e30):
        with torch.no_grad():
            model.lm_head.bias[90:] = low
        target = Target(model, None, "phi")
        torch.manual_seed(0)
        drafter = drafters.make(kind, target)
        loss = drafter.loss(_batch(), LiveFeatures(target, drafter.needs).features(_batch()))
        loss.total.backward()
        found.append([loss.total, *(p.grad for p in drafter.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and bool(one.isfinite().all()) and torch.equal(one, other)


@pytest.mark.field("F71")
def test_a_divergence_from_what_is_ruled_out_is_finite() -> None:
    chance = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 8, generator=chance) for _ in "pq")
    p[:, 3] = -torch.inf
    kept = [0, 1, 2, 4, 5, 6, 7]
    draft = q.requires_grad_()
    found = losses.forward_kl(draft, p)
    expected = p[:, kept].softmax(-1) * (p[:, kept].log_softmax(-1) - q.log_softmax(-1)[:, kept])
    assert torch.allclose(found, expected.sum(-1))
    found.sum().backward()
    assert draft.grad is not None and bool(draft.grad.isfinite().all())


TREES = {
    "chain": Tree.chain(2),
    "tree": Tree.expansion([2, 2]),
    "dynamic": Dynamic(depth=2, top_k=2, total=4),
    "confident": Confident(k=2, stop_below=0.01),
}


@pytest.mark.field("F71")
@pytest.mark.field("F88")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize(("kind", "settings"), [(Eagle1, {}), (Medusa, {}), (Ssm, {"layers": [0]})])
def test_a_drafter_whose_values_overflow_ends_decoding(
    kind: type[Drafter], settings: Any, tree: Any
) -> None:
    target = load.tiny()
    torch.manual_seed(0)
    drafter = drafters.make(kind, target, **settings).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(3e38)
    for policy in (Policy(), Policy(1.0), Policy(1.0, 4, 0.9, 0.1)):
        if policy.greedy or tree.can_draw:
            words = rf"drafter {kind.__name__}: {said('nn.drafter')}"
            with pytest.raises(InputError, match=words):
                decode(target, drafter, PROMPTS[:1], Plan(tree, policy), max_new_tokens=5)


@pytest.mark.field("F71")
@pytest.mark.field("F88")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_values_that_overflow_deeper_in_a_draft_end_decoding(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first candidates are as they should be."""
    target = load.tiny()
    drafter = drafters.make(Eagle1, target).eval()
    inner = drafter.expand

    def expand(*given: Any) -> Any:
        out, found = inner(*given)
        return out, dataclasses.replace(found, logits=found.logits * torch.nan)

    monkeypatch.setattr(drafter, "expand", expand)
    with pytest.raises(InputError, match=rf"drafter Eagle1: {said('nn.drafter')}"):
        decode(target, drafter, PROMPTS[:1], Plan(tree), max_new_tokens=6)
