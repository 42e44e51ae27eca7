"""The wrapper around a target against the library's own forward pass, for every tiny family."""

import json
import pickle

import pytest
import torch

from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.target import fingerprint, load
from drafttrain.tree.topology import Tree
from tests.helpers import save_target, tiny_chat_target
from tests.messages import said

FAMILIES = load.TINY


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.field("F57")
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_head_equal_the_library(family):
    target = load.tiny(family=family)
    x = ids(2, 40)  # exceeds the window of the sliding families
    with torch.inference_mode():
        reference = target.model(input_ids=x, output_hidden_states=True, use_cache=False)
        features = target.features(
            x, torch.tensor([40, 40]), Needs(last_hidden=True, layers=(0, 1))
        )
        torch.testing.assert_close(
            target.head(features.last_hidden), reference.logits, rtol=1e-4, atol=1e-4
        )
    for layer in (0, 1):
        torch.testing.assert_close(features.layers[layer], reference.hidden_states[layer + 1])


@pytest.mark.field("F38")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_padded_batch_equal_single_rows(family):
    target = load.tiny(family=family)
    x = ids(3, 12)
    lengths = [12, 5, 9]
    together = target.features(x, torch.tensor(lengths), Needs(last_hidden=True)).last_hidden
    for row, length in enumerate(lengths):
        single = target.features(
            x[row : row + 1, :length], torch.tensor([length]), Needs(last_hidden=True)
        ).last_hidden
        torch.testing.assert_close(together[row, :length], single[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tree_node_equals_a_plain_forward_over_its_path(family):
    target = load.tiny(family=family)
    tree = Tree.eagle1_static()
    prompts = ids(2, 30)
    lengths = torch.tensor([30, 17])
    cache = target.new_cache(2, 80)
    target.step(prompts, cache)
    cache.commit(lengths)
    tokens = ids(2, tree.size + 1)
    depths = torch.tensor([(0, *tree.depths)])
    out = target.step(tokens, cache, tree_mask=tree.ancestor_mask()[None], depths=depths)
    for row, length in enumerate(lengths.tolist()):
        for node in range(tree.size):
            path, at = [], node
            while at >= 0:
                path.append(at + 1)
                at = tree.parents[at]
            text = torch.cat((prompts[row, :length], tokens[row, [0, *reversed(path)]]))[None]
            plain = target.features(
                text, torch.tensor([text.shape[1]]), Needs(last_hidden=True)
            ).last_hidden
            torch.testing.assert_close(
                out.hidden[row, node + 1], plain[0, -1], rtol=2e-4, atol=2e-4
            )


def test_positions_by_flat_index_would_be_noticed():
    target = load.tiny()
    tree = Tree.expansion([2, 2])
    cache = target.new_cache(1, 40)
    target.step(ids(1, 8), cache)
    cache.commit(torch.tensor([8]))
    tokens = ids(1, tree.size + 1)
    right = target.step(
        tokens,
        cache,
        tree_mask=tree.ancestor_mask()[None],
        depths=torch.tensor([(0, *tree.depths)]),
    ).hidden
    flat = target.step(
        tokens,
        cache,
        tree_mask=tree.ancestor_mask()[None],
        depths=torch.arange(tree.size + 1)[None],
    ).hidden
    assert float((right - flat).abs().max()) > 0.01


def test_fingerprint_names_what_differs():
    one, other = load.tiny(seed=0), load.tiny(seed=1)
    assert one.fingerprint == load.tiny(seed=0).fingerprint
    with pytest.raises(InputError, match="weights"):
        fingerprint.refuse_other(one.fingerprint, other.fingerprint, "the store")
    half = load.tiny(dtype="bfloat16")
    fingerprint.refuse_other(one.fingerprint, half.fingerprint, "the package")
    with pytest.raises(InputError, match="dtype"):
        fingerprint.refuse_other(one.fingerprint, half.fingerprint, "the store", dtype=True)


def test_one_changed_weight_changes_the_fingerprint():
    target = load.tiny()
    before = fingerprint.of_weights(target.model)
    with torch.no_grad():
        target.model.model.layers[1].mlp.up_proj.weight[3, 4] += 1.0
    assert fingerprint.of_weights(target.model) != before


@pytest.mark.field("F57", "F62")
def test_what_cannot_be_represented_is_refused(tmp_path):
    with pytest.raises(InputError, match="attention=flash_attention_2"):
        load.tiny(attention="flash_attention_2")
    with pytest.raises(InputError, match=r"target\.family"):
        load.tiny(family="mamba")
    with pytest.raises(InputError, match=said("target.no_folder")):
        load.hf(str(tmp_path / "nothing"), dtype="float32", device="cpu", attention="sdpa")
    with pytest.raises(InputError, match=r"target\.path=.* config\.json"):
        load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_saved_model_loads_as_the_same_target(tmp_path, family):
    target = load.tiny(family=family)
    target.model.save_pretrained(tmp_path)
    again = load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")
    assert again.fingerprint == target.fingerprint and again.tokenizer is None


@pytest.mark.field("F57")
def test_models_without_a_causal_head_are_refused(tmp_path):
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    LlamaModel(LlamaConfig(**small)).save_pretrained(tmp_path / "headless")
    with pytest.raises(InputError, match=said("target.headless")):
        load.hf(str(tmp_path / "headless"), dtype="float32", device="cpu", attention="sdpa")
    BertModel(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match=said("target.headless")):
        load.hf(str(tmp_path / "bert"), dtype="float32", device="cpu", attention="sdpa")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_beyond_what_the_files_hold_are_not_built(tmp_path, family):
    """Not even as a list of their kinds, which some families make when their config is read."""
    load.tiny(family=family).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {name: value for name, value in config.items() if name != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(InputError, match=said("target.layers_beyond_files")):
        load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")


def test_a_target_that_lacks_tensors_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    load.tiny().model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="up_proj"):
        load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")


@pytest.mark.field("F16")
def test_ends_may_be_several_and_padding_and_start_missing(tmp_path):
    """Any of the ends stops a text; ids for padding and for the start of texts are not needed."""
    target = load.tiny(eos_token_id=[1, 2], pad_token_id=None, bos_token_id=None)
    assert target.stop_ids == (1, 2)
    target.model.save_pretrained(tmp_path)
    again = load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")
    assert again.stop_ids == (1, 2) and again.fingerprint == target.fingerprint
    plain, _ = decode(again, None, [[3, 4, 5]], Plan(Tree.chain(0)), max_new_tokens=12, stop_ids=())
    torch.manual_seed(0)
    drafter = Eagle1(again).eval()
    for place in (2, 5):
        end = plain[0].ids[place]
        for ends in ([end, 319], [319, end]):
            again.model.generation_config.eos_token_id = ends
            outputs, _ = decode(again, drafter, [[3, 4, 5]], Plan(Tree.chain(4)), max_new_tokens=12)
            # The model's own remain ends.
            first = next(i for i, token in enumerate(plain[0].ids) if token in (1, 2, 319, end))
            assert outputs[0].ids == plain[0].ids[: first + 1] and outputs[0].finish == "stop"
    again.model.generation_config.eos_token_id = ["</s>"]
    with pytest.raises(InputError, match="eos_token_id holds </s>"):
        _ = again.stop_ids


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.field("F67")
def test_pickled_weights_of_a_target_are_not_opened(tmp_path):
    marker = tmp_path / "marker"
    load.tiny().model.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    (tmp_path / "target" / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil(marker)}))
    with pytest.raises(InputError, match=said("target.not_loaded") + ": .*safetensors"):
        load.hf(str(tmp_path / "target"), dtype="float32", device="cpu", attention="sdpa")
    assert not marker.exists()


def test_a_tokenizer_that_does_not_work_is_refused_by_the_target(tmp_path):
    target = save_target(tiny_chat_target(), tmp_path / "target")
    load.read_tokenizer(str(target))
    intact = json.loads((target / "tokenizer.json").read_text())
    for change in (
        {"model": {"type": "BPE"}},
        {"decoder": {"type": "Unheard"}},
        {"added_tokens": 3},
    ):
        (target / "tokenizer.json").write_text(json.dumps({**intact, **change}))
        with pytest.raises(InputError, match=said("target.tokenizer")):
            load.hf(str(target), dtype="float32", device="cpu", attention="sdpa")


@pytest.mark.field("F68")
def test_remote_code_is_not_run_unless_asked(tmp_path):
    target = load.tiny()
    target.model.save_pretrained(tmp_path)
    marker = tmp_path / "marker"
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "stranger",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(
        f"open({str(marker)!r}, 'w').write('run')\nclass C: pass\nclass M: pass\n"
    )
    with pytest.raises(InputError, match=r"target\.trust_remote_code"):
        load.hf(str(tmp_path), dtype="float32", device="cpu", attention="sdpa")
    assert not marker.exists()
