"""The embedded target and the conversation set that is shipped with it."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.data.people import KINDS, TALK
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.target import fingerprint, load
from drafttrain.tree.topology import Tree
from drafttrain.wiring.building import build
from drafttrain.wiring.conf import conf_dir
from tests.drafter import make as drafters

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target():
    return load.smollm2(dtype="float32", device="cpu", attention="sdpa")


@pytest.fixture(scope="module")
def shipped():
    return read_set(set_folder("builtin:smollm2"))


def test_the_embedded_target_is_the_one_that_is_documented(target):
    assert (
        target.config.model_type == "llama"
        and target.width == 576
        and len(target.decoder_layers) == 30
    )
    assert target.vocab_size == 49_152 and target.config.tie_word_embeddings
    assert target.tokenizer.decode(target.stop_ids[:1]) == "<|im_end|>"


def test_the_shipped_set_is_small_and_the_targets_own(target, shipped):
    files = list(set_folder("builtin:smollm2").iterdir())
    assert sum(file.stat().st_size for file in files) < 6_000_000
    assert len(shipped) == shipped.manifest["conversations"] >= 3_000
    assert int(shipped.mask.sum()) >= 500_000
    assert len(shipped.prompts()) == 111
    assert set(shipped.temperature[shipped.indices(1)]) == {0.0}, "acceptance is counted on these"
    marks = shipped.manifest["target"]["fingerprint"]
    fingerprint.refuse_other(marks, target.fingerprint, "the set", dtype=True, mode=True)
    assert int(shipped.ids.max()) < target.vocab_size
    ids, mask = shipped.row(len(shipped) - 1)
    text = target.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system") and "<|im_start|>assistant" in text
    assert 0 < int(mask.sum()) < len(ids)


def test_the_shipped_set_has_all_kinds_in_balance(target, shipped):
    for split, talk in ((0, 1195), (1, 7)):
        counts = shipped.by_category(shipped.indices(split))
        assert counts.pop(TALK) == talk
        assert counts.keys() == set(KINDS)
        assert max(counts.values()) - min(counts.values()) <= 1
    source = build(OmegaConf.load(conf_dir() / "prompts/mixture.yaml")).holding_out(112)
    assert shipped.manifest["prompts"] == source.identity(), "its patterns are others now"
    rows = dict(source.read(3400).rows)
    for index in (*shipped.indices(0)[:40], *shipped.indices(1)[:10]):
        number = int(shipped.rows[index])
        assert shipped.category_of(index) == source.kind(number)[0]
        assert source.apart(number) == bool(shipped.split[index])
        if rows[number] is not None:
            text = target.tokenizer.decode(shipped.row(index)[0])
            assert rows[number].users[0].strip() in text


def test_greedy_answers_of_the_set_are_what_the_target_writes(target, shipped):
    """Ids were stored as generated: the target's argmax at every place of a greedy answer, or a
    near-tie of it."""
    greedy = [index for index in shipped.indices(0) if shipped.temperature[index] == 0][:4]
    assert len(greedy) == 4
    for index in greedy:
        ids, mask = shipped.row(index)
        start = int(mask.long().argmax())
        with torch.inference_mode():
            logits = target.model(input_ids=ids[None, : start + 24], use_cache=False).logits[
                0, start - 1 : -1
            ]
        labels = ids[start : start + len(logits)]
        own = mask[start : start + len(logits)]
        gap = (logits.amax(-1) - logits.gather(1, labels[:, None])[:, 0])[own]
        # Differently shaped products round differently, so only a near-tie may fall the other way.
        assert float(gap.max()) < 1e-2 and float(gap.median()) == 0.0


def test_drafting_does_not_change_the_embedded_targets_greedy_text(target, shipped):
    torch.manual_seed(0)
    drafter = drafters.make(Eagle1, target, draft_ids=list(range(4096))).eval()
    prompts = shipped.prompts(2)
    plain, _ = decode(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=8)
    for tree in (Tree.chain(4), Tree.eagle1_static()):
        drafted, _ = decode(target, drafter, prompts, Plan(tree), max_new_tokens=8)
        assert [output.ids for output in drafted] == [output.ids for output in plain]
    library = target.model.generate(
        torch.tensor([prompts[0]]),
        attention_mask=torch.ones(1, len(prompts[0])),
        max_new_tokens=8,
        do_sample=False,
    )
    assert library[0, len(prompts[0]) :].tolist() == plain[0].ids


def test_a_packed_target_is_the_same_target(target):
    other = load.smollm2(dtype="float32", device="cpu", attention="sdpa", pack=not _packed(target))
    assert _packed(other) != _packed(target) and other.fingerprint == target.fingerprint
    x = torch.tensor([[1, 2, 3, 500, 600]])
    with torch.inference_mode():
        torch.testing.assert_close(
            other.model(input_ids=x).logits, target.model(input_ids=x).logits, rtol=1e-3, atol=1e-3
        )


def _packed(target) -> bool:
    return type(target.output).__name__ == "PackedLinear"


def test_half_precision_is_taken_too():
    other = load.smollm2(dtype="bfloat16", device="cpu", attention="sdpa")
    assert other.dtype == torch.bfloat16 and other.context == 8192
