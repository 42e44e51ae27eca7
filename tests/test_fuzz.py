"""Any bytes in a file that comes from elsewhere give an object that works, or one InputError: no
crash, no hang, bounded memory.

A few hundred changed files for each loader every time; ten thousand with `pytest -m slow`. The same
seeds every time.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import signal
import unittest.mock
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from drafttrain.data import template as template_module
from drafttrain.data.conversations import (
    CHECKSUM,
    MANIFEST,
    TENSORS,
    Row,
    check_vocabulary,
    rows_of,
)
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.folder import SetFolder
from drafttrain.data.prompts import PromptFile
from drafttrain.data.row_journal import Journal
from drafttrain.data.template import ChatPieces
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.files import write_json
from drafttrain.layouts.checking import check_directory
from drafttrain.layouts.directory import open_directory
from drafttrain.packaging.manifest import checked_metrics, parameter_count, read_config, training_of
from drafttrain.packaging.reading import load as load_package
from drafttrain.target import fingerprint, load
from drafttrain.target.filling import StoreFolder
from drafttrain.target.load import read_tokenizer
from drafttrain.target.model import Target
from drafttrain.target.shards import digest_of
from drafttrain.target.store import Store
from drafttrain.training.checkpoint import check_complete, read_checkpoint, write_checkpoint
from drafttrain.training.resume import refuse_other_run
from drafttrain.tree.files import read_tree, table
from tests.drafter import make as drafters
from tests.helpers import ALTERNATING, CHATML, tiny_tokenizer
from tests.layouts.foreign import MAKERS, make_target
from tests.layouts.made import read_back
from tests.mutations import (
    Mutation,
    archive_of,
    json_of,
    lines_of,
    packed_of,
    template_of,
    tensors_of,
    text_of,
)
from tests.packaging.made import packed
from tests.target.stores import make_store, random_set, started_store

ROOM = 1 << 30
"""Bytes that reading a changed file may take beyond what the process has; the files have some
kilobytes."""
LONGEST = 20
"""Seconds."""


@dataclass(frozen=True)
class Loader:
    """Files that belong together, how each is changed, and what reads them."""

    files: dict[str, Mutation]
    read: Callable[[Path, str], object]
    """Given the folder and the name of the changed file."""
    watched: bool = True
    """Is a hang noticed from outside? Not where the loader has a clock of its own."""


Maker = Callable[[Path, Target], Loader]


def small() -> Target:
    return load.tiny(layers=2, width=32, vocab_size=256)


# --- what is read ---------------------------------------------------------------------------------


def conversation_set(folder: Path, target: Target) -> Loader:
    random_set(target, folder, rows=6, held_out=2, longest=12)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest[CHECKSUM]  # Who changes a file can change its checksum too.
    write_json(folder / MANIFEST, manifest)

    def read(path: Path, _name: str) -> object:
        data = ConversationData(path)
        check_vocabulary(data.set, target.vocab_size)
        batch = data.batch(range(len(data)))
        assert (
            len(list(rows_of(data.set))) == len(data.set)
            and data.summary()
            and data.fingerprint is not None
        )
        return batch, data.set.prompts(), data.set.digest, data.label_counts(target.vocab_size)

    return Loader({MANIFEST: json_of, TENSORS: tensors_of}, read)


def growing_set(folder: Path, target: Target) -> Loader:
    about = {
        "target": {"name": "t", "fingerprint": target.fingerprint},
        "prompts": {"kind": "self"},
        "writing": {"seed": 0},
    }
    SetFolder(folder).record(about)
    journal = Journal(folder)
    for number in range(4):
        journal.add(Row(number, (3, 4, 5, 2), ((1, 4),), ("stop",), 0.7))
    journal.skip(9, "empty user turn")
    journal.close()

    def read(path: Path, _name: str) -> object:
        found = SetFolder(path)
        found.check(resume=True, adopt=True)
        found.compare(about)
        return found.finished()

    return Loader({"settings.json": json_of, "journal-0000.jsonl": lines_of}, read)


def feature_store(folder: Path, target: Target) -> Loader:
    set_at = random_set(target, folder / "set", rows=6, held_out=0, longest=12)
    data = ConversationData(set_at)
    make_store(target, data, folder / "store", layers=(1,), encoding="int8")

    def manifest(chance: random.Random, content: bytes) -> bytes:
        """With the right checksum, where it can have one: whoever means harm can compute it."""
        content = json_of(chance, content)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return content
        return (
            json.dumps({**found, "digest": digest_of(found)}).encode()
            if isinstance(found, dict)
            else content
        )

    def read(path: Path, _name: str) -> object:
        store = Store(path / "store")
        try:
            assert store.bytes > 0 and store.contents.words()
            store.check_data(data)
            for number in store.shards_of(data):
                store.verify(number)
            names = [part for name in store.contents.names for part in store.tensors_of(name)]
            return [store.rows(name, data.indices, data.lengths) for name in names]
        finally:
            store.close()

    shards = {f"store/{path.name}": tensors_of for path in (folder / "store").glob("shard-*")}
    return Loader({f"store/{MANIFEST}": manifest, **dict(list(shards.items())[:2])}, read)


def growing_store(folder: Path, target: Target) -> Loader:
    data = ConversationData(random_set(target, folder / "set", rows=6, held_out=0, longest=12))
    store, plan, recorded = started_store(target, data, folder / "store")
    journal = store.open_journal(0)
    for batch in range(3):
        journal.write({"batch": batch, "crc": 12345})
    journal.write({"shard": 0, "sha256": "0" * 64})
    journal.close()

    def read(path: Path, _name: str) -> object:
        found = StoreFolder(path / "store")
        found.check(resume=True)
        found.compare(recorded)
        return found.progress(), found.unread(plan, plan.shards)

    return Loader({"store/settings.json": json_of, "store/journal-0000.jsonl": lines_of}, read)


def package(folder: Path, target: Target) -> Loader:
    torch.manual_seed(0)
    rows = [
        {
            "temperature": 0.0,
            "growth": "chain",
            "nodes": 4,
            "rule": "greedy",
            "tau": 1.5,
            "accept_at": [0.5, None],
        }
    ]
    drafter = drafters.make(Eagle1, target, draft_ids=list(range(1, 200, 2)), bias=True)
    packed(folder / "a", drafter, target, metrics={"settings": {}, "rows": rows})

    def read(path: Path, _name: str) -> object:
        config = read_config(path / "a")
        checked_metrics(path / "a")
        return load_package(path / "a", target), training_of(config), parameter_count(config)

    names = {
        "config.json": json_of,
        "drafter.safetensors": tensors_of,
        "decoding.yaml": text_of,
        "metrics.json": json_of,
    }
    return Loader({f"a/{name}": mutation for name, mutation in names.items()}, read)


def package_of_a_model(folder: Path, target: Target) -> Loader:
    torch.manual_seed(0)
    packed(folder / "a", drafters.make(Ssm, target, layers=2, width=16, heads=2), target)

    def read(path: Path, _name: str) -> object:
        return load_package(path / "a", target)

    return Loader(
        {
            "a/config.json": json_of,
            "a/ssm/model.safetensors": tensors_of,
            "a/drafter.safetensors": tensors_of,
        },
        read,
    )


def engine_directories(folder: Path, target: Target) -> Loader:
    """Heads of every layout, next to a target's directory and by themselves."""
    against = make_target(folder / "target")
    kinds = ("eagle3", "dspark", "native", "mtp", "speculators peagle", "speculators dflash")
    for kind in kinds:
        MAKERS[kind](folder / kind)

    def read(path: Path, name: str) -> object:
        head = open_directory(path / name.split("/")[0], "check")
        return [
            check_directory(head, None, theirs)
            for theirs in (None, open_directory(against, "against"))
        ]

    mutations = {"config.json": json_of, "model.safetensors": tensors_of}
    return Loader(
        {f"{kind}/{name}": mutation for kind in kinds for name, mutation in mutations.items()}, read
    )


def heads_taken_over(folder: Path, target: Target) -> Loader:
    torch.manual_seed(0)
    heads = drafters.make(Medusa, target, heads=2)
    files: dict[str, Mutation] = {}
    for name, drafter, engine in (
        ("eagle1", drafters.make(Eagle1, target), "vllm"),
        ("medusa", heads, "vllm"),
        ("old", heads, "medusa"),
    ):
        packed(folder / f"{name}-package", drafter, target)
        export_package(folder / f"{name}-package", target, engine, folder / name)
        for path in (folder / name).iterdir():
            kind = {".json": json_of, ".safetensors": tensors_of}.get(path.suffix)
            files |= {} if kind is None else {f"{name}/{path.name}": kind}

    def read(path: Path, name: str) -> object:
        head = path / name.split("/")[0]
        return check_directory(open_directory(head, "check")), read_back(head, target)

    return Loader(files, read)


def prompts(folder: Path, target: Target) -> Loader:
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    rows: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"messages": [{"role": role, "content": content} for role, content in turns]},
        {"conversations": [{"from": role, "value": content} for role, content in turns]},
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"turns": ["a", "b"], "system": "S"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.json").write_text(json.dumps(rows))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines))

    def read(path: Path, name: str) -> object:
        found = PromptFile(path=str(path / name)).read(None)
        for _, prompt in found.rows:
            assert prompt is not None and prompt.users and "".join(prompt.users).encode()
        return [(item.row, item.reason) for item in found.skipped]

    return Loader({"a.jsonl": lines_of, "b.json": json_of, "c.jsonl.gz": packed_of(lines_of)}, read)


def checkpoint(folder: Path, target: Target) -> Loader:
    facts = {
        "target": {"weights": "a", "dtype": "float32"},
        "data": "b",
        "processes": 1,
        "rate": {"end": 3},
    }
    config = {
        "seed": 0,
        "trainer": {"log_every": 2, "batch_tokens": 512},
        "target": {"dtype": "auto"},
    }
    moments = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(2, 3),
        "exp_avg_sq": torch.ones(2, 3),
    }
    group = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {
        "weights": {"drafter.fc.weight": torch.ones(2, 3)},
        "optimiser": {"state": {0: moments}, "param_groups": [group]},
        "progress": {
            "position": 3,
            "updates": 3,
            "empty_windows": 0,
            "supervised": 30.0,
            "seconds": 1.5,
        },
        "keeper": {"best": 1.5, "best_update": 2, "without_progress": 1},
        "decode": {"measured_at": 2, "evaluations": 1, "tau": 1.5, "seconds": 0.5},
        "facts": facts,
        "settings": config,
    }
    write_checkpoint(folder / "last.ckpt", state)

    def read(path: Path, name: str) -> object:
        with unittest.mock.patch.object(zipfile.ZipFile, "testzip", lambda _: None):  # Likewise.
            found = read_checkpoint(path / name)
        check_complete(found, path / name)
        refuse_other_run(found, facts, config, lambda text: None, Path())
        return found

    return Loader({"last.ckpt": archive_of}, read)


def tokenizer(folder: Path, target: Target) -> Loader:
    tiny_tokenizer().save_pretrained(folder)
    files: dict[str, Mutation] = {}
    for path in folder.iterdir():
        files[path.name] = json_of if path.suffix == ".json" else template_of

    def read(path: Path, _name: str) -> object:
        found = read_tokenizer(str(path))
        fingerprint.of_tokenizer(found), fingerprint.of_template(found)
        return ChatPieces(found, (2,)).first_prompt([{"role": "user", "content": "the thin man"}])

    return Loader(files, read)


def chat_template(folder: Path, target: Target) -> Loader:
    (folder / "a.jinja").write_text(CHATML)
    (folder / "b.jinja").write_text(ALTERNATING)
    own = tiny_tokenizer()

    def read(path: Path, name: str) -> object:
        own.chat_template = (path / name).read_bytes().decode("utf-8", "replace")
        chat = ChatPieces(own, (2,))
        ids = chat.check("Be brief.", ("hello", "again"))
        assert all(type(one) is int for one in ids)
        return (
            chat.grows(with_system=True),
            chat.keeps_reasoning,
            chat.turn_end(),
            chat.before_user(),
            chat.user_to_answer(),
        )

    return Loader({"a.jinja": template_of, "b.jinja": template_of}, read, watched=False)


def trees(folder: Path, target: Target) -> Loader:
    (folder / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [1, 0]]")
    (folder / "tree.yaml").write_text("parents: [-1, -1, 0, 0, 1]\n")
    (folder / "rates.json").write_text("[[0.5, 0.25], [0.4, 0.1]]")

    def read(path: Path, name: str) -> object:
        if name.startswith("tree"):
            found = read_tree(str(path / name))
            return found.ancestor_mask(), found.max_depth
        return table(str(path / name), "rates")

    return Loader({"tree.json": json_of, "tree.yaml": text_of, "rates.json": json_of}, read)


LOADERS: dict[str, tuple[Maker, int]] = {
    "conversation set": (conversation_set, 200),
    "growing set": (growing_set, 200),
    "feature store": (feature_store, 200),
    "growing store": (growing_store, 200),
    "package": (package, 100),
    "package of a model": (package_of_a_model, 60),
    "engine directories": (engine_directories, 200),
    "heads taken over": (heads_taken_over, 150),
    "prompts": (prompts, 300),
    "checkpoint": (checkpoint, 200),
    "tokenizer": (tokenizer, 100),
    "chat template": (chat_template, 200),
    "trees": (trees, 200),
}
"""What is read, and how many changed files are tried every time."""


# --- reading it -----------------------------------------------------------------------------------


class Hang(BaseException):
    """Nothing that a loader could take for an error of the file's."""


@contextmanager
def bounded(seconds: int, size: int, *, watched: bool) -> Iterator[None]:
    """Time and memory that reading may take."""

    def ring(*_: Any) -> None:
        raise Hang(f"more than {seconds} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + size if hard == resource.RLIM_INFINITY else min(taken + size, hard)
    before = signal.signal(signal.SIGALRM, ring) if watched else None
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        if watched:
            signal.alarm(seconds)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if watched:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def fuzz(name: str, folder: Path, examples: int) -> Counter[str]:
    """Try changed files; how many were read, and how many refused."""
    loader = LOADERS[name][0](folder, small())
    outcomes: Counter[str] = Counter()

    def with_content(file: str, content: bytes) -> None:
        path = folder / file
        original = path.read_bytes()
        path.unlink()  # What maps the old file keeps it.
        path.write_bytes(content)
        try:
            with bounded(LONGEST, ROOM, watched=loader.watched):
                loader.read(folder, file)
            outcomes["read"] += 1
        except InputError as error:
            assert str(error).strip()
            outcomes["refused"] += 1
        finally:
            path.unlink()
            path.write_bytes(original)

    for file in loader.files:
        loader.read(folder, file)
        for content in (b"", b"\0" * 64, b"{" * 500, b"\xff\xfe" * 20):
            with_content(file, content)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def try_one(seed: int) -> None:
        chance = random.Random(seed)
        file = chance.choice(list(loader.files))
        with_content(file, loader.files[file](chance, (folder / file).read_bytes()))

    try_one()
    return outcomes


@pytest.mark.parametrize("name", LOADERS)
def test_changed_files_are_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "MOST_SECONDS", 1.0)
    outcomes = fuzz(name, tmp_path, LOADERS[name][1])
    assert outcomes["refused"] > 10 and outcomes["read"] > 0, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_ten_thousand_changed_files_are_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "MOST_SECONDS", 1.0)
    outcomes = fuzz(name, tmp_path, 10_000)
    assert sum(outcomes.values()) >= 9_000, outcomes
