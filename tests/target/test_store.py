"""A store serves what online features give; whatever is damaged, foreign or lacking is refused
before it is trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.data.datamodule import ConversationData, EpochSampler
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.target import load
from drafttrain.target.features import LAST, OnlineFeatures, computed
from drafttrain.target.filling import Batches
from drafttrain.target.model import Target
from drafttrain.target.shards import digest_of
from drafttrain.target.store import Store
from drafttrain.target.stored import StoredFeatures, gives_last
from tests.messages import said
from tests.target.stores import make_store, random_set, started_store
from tests.training.parts import tiny

BOTH = Needs(last_hidden=True, layers=(0, 1))
ONE = Needs(last_hidden=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


@pytest.fixture(scope="module")
def set_at(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_set(target, tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def data(set_at: Path) -> ConversationData:
    return ConversationData(set_at)


@pytest.fixture(scope="module")
def kept(target: Target, data: ConversationData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 store of both layers and the last hidden state, in several shards."""
    return make_store(target, data, tmp_path_factory.mktemp("store"), layers=(0, 1))


@pytest.fixture
def store(target: Target, data: ConversationData, tmp_path: Path) -> Path:
    """One that a test may damage: only last hidden states."""
    return make_store(target, data, tmp_path / "store")


def online(
    target: Target, data: ConversationData, needs: Needs, dtype: str = "float32"
) -> OnlineFeatures:
    groups = EpochSampler(data.lengths, batch_tokens=64).batches(0)
    return OnlineFeatures(target, needs, data=data, groups=groups, keep_dtype=dtype)


def assert_same(one: Features, two: Features) -> None:
    assert (one.last_hidden is None) == (
        two.last_hidden is None
    ) and one.layers.keys() == two.layers.keys()
    pairs = [(one.layers[layer], two.layers[layer]) for layer in one.layers]
    if one.last_hidden is not None and two.last_hidden is not None:
        pairs.append((one.last_hidden, two.last_hidden))
    for a, b in pairs:
        assert a.dtype == b.dtype and torch.equal(a, b)
        assert not a.requires_grad and not a.is_inference()


# --- what is served -------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "dtype"), [("float32", "float32"), ("bf16", "bfloat16")])
def test_stored_features_are_online_features_bit_for_bit(
    target: Target, data: ConversationData, tmp_path: Path, encoding: str, dtype: str
) -> None:
    path = make_store(target, data, tmp_path / "store", layers=(0, 1), encoding=encoding)
    assert len(list(path.glob("shard-*"))) > 2
    source, reference = (
        StoredFeatures(target, BOTH, data=data, path=path),
        online(target, data, BOTH, dtype),
    )
    sampler = EpochSampler(data.lengths, batch_tokens=64)
    for epoch in (0, 1):
        for places in sampler.batches(epoch):
            assert_same(source.features(data.batch(places)), reference.features(data.batch(places)))
    for places in ([3, 0, 3, ~1], list(range(len(data)))[::-1]):
        assert_same(source.features(data.batch(places)), reference.features(data.batch(places)))
    assert encoding in source.describe() and str(path) in source.describe()
    assert source.facts() == {"store": Store(path).digest}
    source.close()


def test_the_target_reads_nothing(
    target: Target, data: ConversationData, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = StoredFeatures(target, BOTH, data=data, path=kept)
    monkeypatch.setattr(target, "features", lambda *given: pytest.fail("the target did a pass"))
    for places in EpochSampler(data.lengths, batch_tokens=64).batches(0):
        source.features(data.batch(places))


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_small_encodings_serve_what_the_target_computed_to_their_bounds(
    target: Target, data: ConversationData, tmp_path: Path, encoding: str
) -> None:
    path = make_store(target, data, tmp_path / "store", encoding=encoding, layers=(0,))
    source, reference = (
        StoredFeatures(target, Needs(True, (0,)), data=data, path=path),
        online(target, data, Needs(True, (0,))),
    )
    batch = data.batch(list(range(len(data))))
    a, b = source.features(batch), reference.features(batch)
    for found, right in ((a.last_hidden, b.last_hidden), (a.layers[0], b.layers[0])):
        assert found is not None and right is not None and found.dtype == torch.float32
        largest = right.abs().amax(-1, keepdim=True)
        bound = (
            largest / 254
            if encoding == "int8"
            else torch.maximum(right.abs() / 16, largest / 448 * 2**-10)
        )
        assert bool(((found - right).abs() <= bound * 1.001).all())
        assert not torch.equal(found, right)
    exact = sum(
        path.stat().st_size
        for path in make_store(target, data, tmp_path / "exact", layers=(0,)).glob("shard-*")
    )
    assert sum(path.stat().st_size for path in path.glob("shard-*")) < exact / 2


def test_a_shard_is_ordinary_safetensors(
    target: Target, data: ConversationData, kept: Path
) -> None:
    store = Store(kept)
    reference = online(target, data, BOTH)
    for shard in store.shards:
        tensors = load_file(kept / shard.name)
        assert sorted(tensors) == ["last_hidden", "layer.0", "layer.1"]
        at = 0
        for row, n in zip(shard.rows, shard.lengths, strict=True):
            right = reference.features(data.batch([data.indices.index(row)])).layers[1][0, :n]
            assert torch.equal(tensors["layer.1"][at : at + n], right)
            at += n


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_the_last_hidden_state_is_made_of_the_last_layer(
    family: str, data: ConversationData, tmp_path: Path
) -> None:
    target = load.tiny(family=family, layers=2, width=32, vocab_size=256)
    assert gives_last(target)
    path = make_store(target, data, tmp_path / "store", last_hidden=False, layers=(1,))
    source = StoredFeatures(target, Needs(True, (1,)), data=data, path=path)
    reference = online(target, data, Needs(True, (1,)))
    for places in EpochSampler(data.lengths, batch_tokens=64).batches(1):
        assert_same(source.features(data.batch(places)), reference.features(data.batch(places)))
    assert "recomputed from layer 1" in source.describe()
    one = StoredFeatures(target, ONE, data=data, path=path).features(data.batch([0]))
    assert one.last_hidden is not None and not one.layers


def test_a_norm_that_does_not_make_it_is_noticed(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    path = make_store(target, data, tmp_path / "store", last_hidden=False, layers=(1,))
    other = tiny()

    def twice(module: Any, given: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    other.base.register_forward_hook(twice)
    assert not gives_last(other)
    with pytest.raises(InputError, match=said("target.store_lacks_last")):
        StoredFeatures(other, ONE, data=data, path=path)


@pytest.mark.field("F27")
def test_rows_may_be_cut_shorter_and_rows_left_out(
    target: Target, set_at: Path, data: ConversationData, kept: Path
) -> None:
    fewer = ConversationData(set_at, max_length=16, limit_rows=5)
    source = StoredFeatures(target, BOTH, data=fewer, path=kept)
    uncut = StoredFeatures(target, BOTH, data=data, path=kept)
    for place in range(len(fewer)):
        batch = fewer.batch([place])
        found = source.features(batch)
        right = uncut.features(data.batch([data.indices.index(fewer.indices[place])]))
        assert (
            found.last_hidden is not None
            and right.last_hidden is not None
            and found.last_hidden.shape[1] <= 16
        )
        assert torch.equal(found.last_hidden, right.last_hidden[:, : found.last_hidden.shape[1]])


def test_a_drafter_that_needs_nothing_reads_nothing(
    target: Target, data: ConversationData, kept: Path
) -> None:
    source = StoredFeatures(target, Needs(), data=data, path=kept)
    assert (
        source.features(data.batch([0])) == Features() and "only from the text" in source.describe()
    )


# --- what is foreign or lacking -------------------------------------------------------------------


def test_what_the_store_is_not_of_is_refused(
    target: Target, set_at: Path, data: ConversationData, kept: Path, store: Path, tmp_path: Path
) -> None:
    def refused(
        fault: str,
        *,
        of: Target = target,
        needs: Needs = ONE,
        rows: ConversationData = data,
        path: Path = kept,
    ) -> None:
        with pytest.raises(InputError, match=said(f"target.store_{fault}")):
            StoredFeatures(of, needs, data=rows, path=path)

    sizes: dict[str, Any] = {"layers": 2, "width": 32, "vocab_size": 256}
    refused("of_other_weights", of=load.tiny(**sizes, seed=1))
    refused("of_another_dtype", of=load.tiny(**sizes, dtype="bfloat16"))
    refused("of_another_set", rows=ConversationData(random_set(target, tmp_path / "set", seed=1)))
    refused("lacks_layer", needs=Needs(True, (1,)), path=store)
    refused("without_such_layer", needs=Needs(layers=(2,)))
    few = ConversationData(set_at, limit_rows=4)
    refused("lacks_rows", path=make_store(target, few, tmp_path / "few"))
    short = ConversationData(set_at, max_length=16)
    refused("cuts_rows", path=make_store(target, short, tmp_path / "cut"))
    refused("not_finished", path=tmp_path)
    started_store(target, data, tmp_path / "started")
    refused("not_finished", path=tmp_path / "started")
    refused("of_another_kind", path=set_at)
    odd: Any = "perhaps"
    with pytest.raises(InputError, match=r"features\.verify=perhaps"):
        StoredFeatures(target, ONE, data=data, path=kept, verify=odd)


# --- what is damaged ------------------------------------------------------------------------------


def shard_of(path: Path) -> Path:
    return path / "shard-00001.safetensors"


def cut(path: Path) -> None:
    os.truncate(shard_of(path), shard_of(path).stat().st_size - 5)


def emptied(path: Path) -> None:
    shard_of(path).write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(shard_of(path).read_bytes())
    content[-7] ^= 4
    shard_of(path).write_bytes(content)


def lost(path: Path) -> None:
    shard_of(path).unlink()


def exchanged(path: Path) -> None:
    shard_of(path).write_bytes((path / "shard-00000.safetensors").read_bytes())


def long_header(path: Path) -> None:
    content = bytearray(shard_of(path).read_bytes())
    content[:8] = (1 << 40).to_bytes(8, "little")
    shard_of(path).write_bytes(content)


def no_header(path: Path) -> None:
    content = bytearray(shard_of(path).read_bytes())
    content[8:20] = b"nothing here"
    shard_of(path).write_bytes(content)


def saved_again(path: Path, change: Callable[[Tensor], Tensor]) -> None:
    """A shard written by another program, with the right marks."""
    content = shard_of(path).read_bytes()
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = {name: change(value) for name, value in load_file(shard_of(path)).items()}
    save_file(tensors, shard_of(path), metadata=head["__metadata__"])


def narrower(path: Path) -> None:
    saved_again(path, lambda value: value[:, :-1].contiguous())


def pipe(path: Path) -> None:
    """Whoever opens it waits for a writer that never comes."""
    shard_of(path).unlink()
    os.mkfifo(shard_of(path))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "size"),
    "emptied": (emptied, "header_unreadable"),
    "flipped": (flipped, "checksum"),
    "lost": (lost, "lost"),
    "a pipe": (pipe, "no_file"),
    "exchanged": (exchanged, "another_shard"),
    "long header": (long_header, "long_header"),
    "no header": (no_header, "header_unreadable"),
    "other shape": (narrower, "narrower"),
    "other dtype": (lambda path: saved_again(path, lambda value: value.half()), "half"),
}


@pytest.mark.field("F32")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_refused(
    target: Target, data: ConversationData, store: Path, kind: str
) -> None:
    harm, fault = DAMAGE[kind]
    # It was intact, and had been read through, when the damage came.
    StoredFeatures(target, ONE, data=data, path=store)
    harm(store)
    with pytest.raises(InputError, match=said(f"target.shard_{fault}")) as refused:
        StoredFeatures(target, ONE, data=data, path=store)
    assert "run the same capture again" in str(refused.value) and "shard-00001.safetensors" in str(
        refused.value
    )
    if kind != "flipped":
        with pytest.raises(InputError, match=said(f"target.shard_{fault}")):
            StoredFeatures(target, ONE, data=data, path=store, verify=False)


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another manifest with a checksum that is right."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    manifest["digest"] = digest_of(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def set_in(*keys: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a value under keys; the last one is the value."""

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        *way, name, value = keys
        for key in way:
            node = node[key]
        node[name] = value

    return change


def without_a_row(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["rows"].pop()
    manifest["shards"][0]["lengths"].pop()


def with_a_row_twice(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["rows"][0] = manifest["shards"][1]["rows"][0]


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "outside": (set_in("shards", 1, "file", "../shard-00001.safetensors"), "shard_name"),
    "absolute": (set_in("shards", 0, "file", "/etc/passwd"), "shard_name"),
    "missing row": (without_a_row, "manifest_counts"),
    "row twice": (with_a_row_twice, "manifest_row_twice"),
    "negative row": (set_in("shards", 0, "rows", 0, -1), "manifest_rows"),
    "huge length": (set_in("shards", 0, "lengths", 0, 1 << 60), "manifest_rows"),
    "long row": (set_in("shards", 0, "lengths", 0, (1 << 32) - 1), "manifest_counts"),
    "float length": (set_in("shards", 0, "lengths", 0, 1.5), "manifest_rows"),
    "no rows": (set_in("shards", 0, "rows", []), "manifest_rows"),
    "manifest_no_shards": (set_in("shards", []), "manifest_no_shards"),
    "shards of text": (set_in("shards", "all"), "manifest_no_shards"),
    "no checksum": (set_in("shards", 0, "sha256", "x"), "manifest_shard"),
    "huge width": (set_in("contents", "width", (1 << 32) - 1), "store_of_another_width"),
    "wider": (set_in("contents", "width", 1 << 70), "manifest_contents"),
    "other layers": (set_in("contents", "layers", [5]), "store_without_such_layer"),
    "many layers": (set_in("contents", "layers", list(range(100_000))), "store_without_such_layer"),
    "layers twice": (set_in("contents", "layers", [1, 1]), "manifest_contents"),
    "nothing kept": (set_in("contents", "last_hidden", False), "manifest_contents"),
    "encoding": (set_in("contents", "encoding", "int4"), "manifest_encoding"),
    "another encoding": (set_in("contents", "encoding", "bf16"), "shard_another_shard"),
    "encoding of lists": (set_in("contents", "encoding", ["bf16"]), "manifest_encoding"),
    "batches": (set_in("batches", "seed", 1), "shard_another_shard"),
    "fingerprint": (set_in("target", "fingerprint", "none"), "manifest_fingerprint"),
    "fingerprint of numbers": (
        set_in("target", "fingerprint", {"weights": 3}),
        "manifest_fingerprint",
    ),
    "format": (set_in("format", 2), "manifest_format"),
    "format of truth": (set_in("format", True), "manifest_format"),
    "no contents": (set_in("contents", 3), "manifest_lacks_contents"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused(
    target: Target, data: ConversationData, store: Path, kind: str
) -> None:
    change, fault = HOSTILE[kind]
    changed(store, change)
    with pytest.raises(InputError, match=said(f"target.{fault}")):
        StoredFeatures(target, ONE, data=data, path=store)


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, '{"format": ' + "1" * 5000 + "}", "\ud800"], ids=range(5)
)
def test_what_is_no_manifest_is_refused(
    target: Target, data: ConversationData, store: Path, content: str
) -> None:
    (store / "manifest.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"manifest\.json"):
        StoredFeatures(target, ONE, data=data, path=store)


def test_a_shard_that_is_cut_while_it_is_read_is_named(
    target: Target, data: ConversationData, store: Path
) -> None:
    """Without a look at its size the system would end the process. What was removed, or replaced by
    a shorter file, is still there for who has it open."""
    source = StoredFeatures(target, ONE, data=data, path=store)
    batch = data.batch(range(len(data)))
    before = source.features(batch).last_hidden
    (store / "shard-00000.safetensors").unlink()
    path = shard_of(store)
    content = path.read_bytes()
    path.rename(store / "kept")
    path.write_bytes(content[:100])
    assert before is not None
    again = source.features(batch).last_hidden
    assert again is not None and torch.equal(again, before)
    (store / "kept").replace(path)
    os.truncate(path, len(content) - 1)
    with pytest.raises(InputError, match=rf"{path} is damaged \(cut to {len(content) - 1} of"):
        source.features(batch)
    os.truncate(path, 0)
    with pytest.raises(InputError, match=rf"cut to 0 of {len(content)} bytes"):
        source.features(batch)
    with pytest.raises(InputError, match=r"shard-00001.*is damaged|cannot be read"):
        StoredFeatures(target, ONE, data=data, path=store)


def test_a_manifest_with_a_flipped_letter_and_one_that_is_too_large(
    target: Target, data: ConversationData, store: Path
) -> None:
    path = store / "manifest.json"
    text = path.read_text()
    path.write_text(
        text.replace('"tokens": 1', '"tokens": 2', 1)
        if '"tokens": 1' in text
        else text.replace("tiny", "tony", 1)
    )
    with pytest.raises(InputError, match=said("target.manifest_checksum")):
        StoredFeatures(target, ONE, data=data, path=store)
    os.truncate(path, 100 << 20)
    with pytest.raises(InputError, match=said("target.manifest_too_large")):
        StoredFeatures(target, ONE, data=data, path=store)


@pytest.mark.field("F32")
@pytest.mark.parametrize("encoding", ["float32", "fp8"])
def test_features_that_are_not_finite_name_their_rows(
    target: Target, data: ConversationData, tmp_path: Path, encoding: str
) -> None:
    """A store that another program wrote: checksums are right, two rows are not."""
    poisoned = {data.indices[2]: float("nan"), data.indices[7]: float("inf")}

    def read(batch: Batch) -> Mapping[str | int, Tensor]:
        values = {name: value.clone() for name, value in computed(target, batch, ONE).items()}
        for place, row in enumerate(batch.row_ids.tolist()):
            if row in poisoned:
                values[LAST][place, 3, 5] = poisoned[row]
        return values

    path = make_store(target, data, tmp_path / "store", encoding=encoding, read=read, shard_mb=None)
    named = ", ".join(map(str, sorted(poisoned)))
    with pytest.raises(InputError, match=f"rows {named} {said('target.not_finite')}"):
        StoredFeatures(target, ONE, data=data, path=path)
    source = StoredFeatures(target, ONE, data=data, path=path, verify=False)
    source.features(data.batch([0, 1]))
    with pytest.raises(InputError, match=f"rows {data.indices[7]} {said('target.not_finite')}"):
        source.features(data.batch([6, 7]))


# --- filling --------------------------------------------------------------------------------------


def test_a_batch_that_the_disk_lost_is_read_again_and_no_other(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    """As after a power failure: the journal names a batch whose bytes are not there."""
    folder, plan, settings = started_store(target, data, tmp_path / "store", shard_mb=None)
    seen: list[list[int]] = []

    def read(batch: Batch) -> Mapping[str | int, Tensor]:
        seen.append(batch.row_ids.tolist())
        return computed(target, batch, ONE)

    journal = folder.open_journal(0)
    filling = folder.fill(plan, plan.shards, data, journal, read)
    for _ in range(3):
        next(filling)
    filling.close()
    journal.close()
    assert [path.name for path in folder.path.glob("shard*")] == ["shard-00000.safetensors.part"]
    part = folder.path / "shard-00000.safetensors.part"
    layout = plan.layout(plan.shards[0])
    assert part.stat().st_size == layout.size  # All of its room is taken from the start.
    content = bytearray(part.read_bytes())
    second = sum(data.lengths[i] for i in plan.batches[0][0])
    content[layout.pieces[LAST].start + second * 4 * target.width] ^= 1
    part.write_bytes(content)
    first = list(seen)
    seen.clear()
    read_before = sum(data.lengths[data.indices.index(row)] for batch in first for row in batch)
    assert folder.unread(plan, plan.shards) == data.tokens - read_before
    journal = folder.open_journal(0)
    tokens = sum(folder.fill(plan, plan.shards, data, journal, read))
    journal.close()
    batches = [[data.indices[i] for i in batch] for batch in plan.batches[0]]
    assert first == batches[:3] and seen == [batches[1], *batches[3:]]
    assert tokens == data.tokens - read_before + sum(data.lengths[i] for i in plan.batches[0][1])
    folder.finish(plan, settings, {})
    folder.clear()
    calm = make_store(target, data, tmp_path / "calm", shard_mb=None)
    assert (folder.path / "shard-00000.safetensors").read_bytes() == (
        calm / "shard-00000.safetensors"
    ).read_bytes()
    assert Store(folder.path).digest == Store(calm).digest


def test_a_damaged_journal_names_file_and_line(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    folder, _, _ = started_store(target, data, tmp_path / "store")
    for line in (
        '{"batch":-1,"crc":3}',
        '{"batch":1}',
        '{"shard":0,"sha256":"../x"}',
        "[1]",
        "nothing",
    ):
        (folder.path / "journal-0003.jsonl").write_text('{"batch":0,"crc":3}\n' + line + "\n")
        with pytest.raises(InputError, match=r"journal-0003\.jsonl, line 2"):
            folder.progress()


def test_a_folder_that_is_not_its_own_is_refused(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    folder, _, _ = started_store(target, data, tmp_path / "store")
    (folder.path / "shard-00000.safetensors.part").write_text("")
    folder.check(resume=True)
    with pytest.raises(InputError, match="resume=false"):
        folder.check(resume=False)
    (folder.path / "settings.json").unlink()
    with pytest.raises(InputError, match=r"shard-00000\.safetensors\.part .* settings\.json"):
        folder.check(resume=True)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"out=.*\(notes\.txt\)"):
        folder.check(resume=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_tokens": None}, "batch_tokens or batch_rows"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"batch_rows": 1.5}, r"batch_rows=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"shard_mb": 0}, "shard_mb=0"),
        ({"shard_mb": "big"}, "shard_mb=big"),
        ({"shard_mb": True}, "shard_mb=True"),
    ],
)
def test_settings_of_batches_are_checked(settings: dict[str, Any], named: str) -> None:
    common: dict[str, Any] = {"batch_tokens": 64, "batch_rows": None, "seed": 0, "shard_mb": None}
    with pytest.raises(InputError, match=named):
        Batches(**common | settings)
