"""Files changed as damage or malice would: bytes, JSON, JSON Lines, safetensors, archives of
tensors, chat templates."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import pickletools
import random
import zipfile
from collections.abc import Callable
from typing import Any

import torch

Mutation = Callable[[random.Random, bytes], bytes]

WORDS = (
    "", "a", "0", "F32", "I64", "\0", "../../x", "/etc/passwd", "é\ud800", "x" * 300, "{}",
    "os.system", "drafttrain.drafter.eagle1.Eagle1",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64, 10**30,
    -(10**18), 0.5, -0.5, 1e308, 1e-320,
)  # fmt: skip
SIGNS = (
    b"[", b"{", b"]", b"}", b": ", b", ", b"- ", b"\n", b"  ", b'"', b"'", b"&a ", b"*a", b"!!",
    b"1e9", b"null", b"0x", b"F", b"!!bool ", b"!!timestamp ", b"!!int ", b"!!float '' ", b"!!set ",
    b"!!binary ", b"? ", b"<<: ",
)  # fmt: skip
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "F32",
    "F64",
    "I64",
    "F8_E4M3",
    "C64",
    "none",
    "",
)
OPCODES = [op.code.encode("latin1") for op in pickletools.opcodes]


# --- plain values ---------------------------------------------------------------------------------


def value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.randrange(8 if depth else 6)
    if kind < 2:
        return chance.choice(NUMBERS)
    if kind == 2:
        return chance.choice(WORDS)
    if kind < 6:
        return chance.choice((None, True, False, math.nan, math.inf, chance.randint(-5, 400)))
    if kind == 6:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(WORDS): value(chance, depth - 1) for _ in range(chance.randrange(4))}


def changed(chance: random.Random, intact: Any, times: int = 3) -> Any:
    """A copy with a few of its inner values replaced, taken away, doubled or moved."""
    intact = copy.deepcopy(intact)
    for _ in range(chance.randint(1, times)):
        parent, key = _place(chance, intact)
        if parent is None:
            intact = value(chance)
            continue
        kind = chance.randrange(6)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == 1:
            parent[chance.choice(WORDS)] = parent.pop(key)
        elif kind == 2:
            other, place = _place(chance, intact)
            if other is not None and other is not parent:
                parent[key] = copy.deepcopy(other[place])
        elif kind == 3 and isinstance(parent[key], int) and not isinstance(parent[key], bool):
            parent[key] += chance.choice(
                (-1, 1, -parent[key] * 2, parent[key] << chance.randrange(40))
            )
        elif kind == 3 and isinstance(parent[key], str):
            text = parent[key]
            at = chance.randrange(len(text) + 1)
            parent[key] = text[:at] + chance.choice(WORDS) + text[at + chance.randrange(3) :]
        else:
            parent[key] = value(chance)
    return intact


def _place(chance: random.Random, intact: Any) -> tuple[Any, Any]:
    """A container and the key of one of its values; (None, None) is all of it."""
    parent, key, node = None, None, intact
    while isinstance(node, dict | list) and node and (parent is None or chance.random() < 0.8):
        if parent is None and chance.random() < 0.03:
            break
        parent = node
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
        node = parent[key]
    return parent, key


# --- files ----------------------------------------------------------------------------------------


def bytes_of(chance: random.Random, intact: bytes) -> bytes:
    """Something else altogether, or the same with a few bytes changed, cut out, put in or
    doubled."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(200))
    content = bytearray(intact)
    for _ in range(chance.randint(1, 6)):
        at, size = chance.randrange(len(content) + 1), chance.choice((1, 1, 2, 8, 50, 1000))
        kind = chance.randrange(5)
        if kind == 0:
            content[at : at + size] = chance.randbytes(min(size, 50))
        elif kind == 1:
            del content[at : at + size]
        elif kind == 2:
            content[at:at] = content[at : at + size]
        elif kind == 3 and at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 4 and chance.random() < 0.3:
            del content[at:]
    return bytes(content)


def text_of(chance: random.Random, intact: bytes) -> bytes:
    """As bytes, with signs that mean something in JSON, YAML and templates."""
    content = bytes_of(chance, intact) if chance.random() < 0.3 else intact
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        signs = chance.choice(SIGNS) * chance.choice((1, 1, 1, 20, 3000))
        content = content[:at] + signs + content[at + chance.randrange(3) :]
    return content


def json_of(chance: random.Random, intact: bytes) -> bytes:
    if chance.random() < 0.2:
        return text_of(chance, intact)
    try:
        found = json.loads(intact)
    except (ValueError, RecursionError):
        return bytes_of(chance, intact)
    return json.dumps(changed(chance, found)).encode()


def lines_of(chance: random.Random, intact: bytes) -> bytes:
    """JSON Lines."""
    lines = intact.splitlines()
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        lines[at] = (json_of if chance.random() < 0.8 else bytes_of)(chance, lines[at])
    return b"\n".join(lines) + chance.choice((b"\n", b"\n", b"", b"\r\n\n"))


def packed_of(inner: Mutation) -> Mutation:
    """In an envelope of gzip, which is damaged now and then."""

    def mutation(chance: random.Random, intact: bytes) -> bytes:
        if chance.random() < 0.3:
            return bytes_of(chance, intact)
        return gzip.compress(inner(chance, gzip.decompress(intact)), 1)

    return mutation


def tensors_of(chance: random.Random, intact: bytes) -> bytes:
    """safetensors: the header with its lengths, kinds and places, and what follows it."""
    if chance.random() < 0.15:
        return bytes_of(chance, intact)
    size = int.from_bytes(intact[:8], "little")
    header, body = json.loads(intact[8 : 8 + size]), intact[8 + size :]
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([name for name in header if name != "__metadata__"] or [""])
        said = header.get(name)
        kind = chance.randrange(7)
        whole_entry = isinstance(said, dict) and all(
            isinstance(said.get(part), list) for part in ("shape", "data_offsets")
        )
        if kind == 0 or not whole_entry or len(said["data_offsets"]) != 2:
            header = changed(chance, header, 1)
            header = header if isinstance(header, dict) else {"x": header}
        elif kind == 1:
            said["dtype"] = chance.choice(DTYPES)
        elif kind == 2 and said["shape"]:
            said["shape"][chance.randrange(len(said["shape"]))] = chance.choice(NUMBERS)
        elif kind == 3:
            said["data_offsets"][chance.randrange(2)] = chance.choice(NUMBERS)
        elif kind == 4:  # Values of another size or number, and a body that fits them.
            body = (
                body + chance.randbytes(chance.choice((0, 1, 8)))
                if chance.random() < 0.5
                else body[: len(body) // 2]
            )
        elif kind == 5:
            header[chance.choice(WORDS)] = copy.deepcopy(said)
        else:
            header = {name: said for name, said in header.items() if chance.random() < 0.8}
        if kind == 6 and body:
            at = chance.randrange(len(body))
            body = body[:at] + chance.randbytes(1) + body[at + 1 :]
    text = json.dumps(header).encode()
    length = (
        len(text)
        if chance.random() < 0.9
        else chance.choice((0, 1, len(text) + 1, 2**40, 2**63, 2**64 - 1))
    )
    return length.to_bytes(8, "little") + text + body


def archive_of(chance: random.Random, intact: bytes) -> bytes:
    """What torch.save wrote: its values, its pickle's steps, its parts and its bytes."""
    kind = chance.randrange(4)
    if kind == 0:
        return bytes_of(chance, intact)
    file = io.BytesIO()
    if kind == 1:
        state = torch.load(io.BytesIO(intact), weights_only=True)
        torch.save(changed(chance, state), file)
        return file.getvalue()
    with zipfile.ZipFile(io.BytesIO(intact)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = (
        next(name for name in parts if name.endswith("data.pkl"))
        if kind == 2
        else chance.choice(list(parts))
    )
    if kind == 2 and chance.random() < 0.5:
        parts[name] = (
            b"\x80\x02"
            + b"".join(
                chance.choice(OPCODES) + chance.randbytes(chance.choice((0, 0, 1, 1, 4)))
                for _ in range(chance.randrange(40))
            )
            + b"."
        )
    else:
        parts[name] = bytes_of(chance, parts[name])
    if chance.random() < 0.1:
        del parts[chance.choice(list(parts))]
    with zipfile.ZipFile(
        file, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


PIECES = (
    "{{", "}}", "{%", "%}", "{%- ", " -%}", " for m in messages ", " for i in range(99) ",
    " endfor ", " if ", " endif ", " else ", " elif ", "messages", "messages[0]", "m", ".content",
    ".role", "['content']", " | trim ", " | tojson ", " | length ", " == ", " ~ ", " + ", " * ",
    " ** ", " % ", "'user'", "'x'", "1", "99", " set x = ", " set ns.x = ", "namespace(x='')",
    "ns.x", "loop.last", "loop.index0", "raise_exception('no')", "add_generation_prompt",
    "bos_token", "eos_token", "''.__class__.__mro__", ".split('>')[-1]", "<|im_start|>",
    "<|im_end|>", "\n", " macro f(a) ", " endmacro ", "f(x)", "cycler", "lipsum(5)", "self",
    "caller()", "include 'x'", " generation ", " endgeneration ", "strftime_now('%Y')", " break ",
    " not ", " in ", " is defined ", "(", ")", "[", "]", ":",
)  # fmt: skip


def template_of(chance: random.Random, intact: bytes) -> bytes:
    """A chat template, put together again or changed here and there."""
    if chance.random() < 0.3:
        return "".join(chance.choices(PIECES, k=chance.randrange(1, 30))).encode()
    text = intact.decode()
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        text = (
            text[:at]
            + "".join(chance.choices(PIECES, k=chance.randrange(4)))
            + text[at + chance.choice((0, 0, 1, 5, 20)) :]
        )
    return text.encode()
