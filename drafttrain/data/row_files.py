"""Rows of a file, with their numbers: JSON Lines, a JSON array, or parquet.

A row that cannot be read comes as the `Unusable` that says why; the rows after it are read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from drafttrain.data.shapes import TableRow, Unusable
from drafttrain.errors import InputError, first_line

_LONGEST_LINE, _LONGEST_ARRAY = 64 << 20, 1 << 30
"""Bytes; a packed file of some kilobytes can unfold to lines of any length."""


def file_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[int, Any]]:
    """Numbered rows.

    Args:
        columns: those to read where a file keeps them apart; the others' names come with None.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if head == b"PAR1":
        return _parquet_rows(path, columns)
    return _json_rows(path, packed=head[:2] == b"\x1f\x8b")


def _parquet_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            blank = dict.fromkeys(file.schema_arrow.names)
            read = [name for name in blank if name in columns]
            if not read:
                yield from ((n, blank) for n in range(1, file.metadata.num_rows + 1))
                return
            for batch in file.iter_batches(batch_size=1024, columns=read):
                for row in batch.to_pylist():
                    number += 1
                    yield number, TableRow(blank | row)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _json_rows(path: Path, *, packed: bool) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        first = b""
        while not first.strip(b"\xef\xbb\xbf \t\r\n"):
            line = file.readline(_LONGEST_LINE)
            if not line:
                return
            first = line
        if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            file.seek(0)
            try:
                text = bytearray()
                while part := file.read(1 << 20):
                    text += part
                    if len(text) > _LONGEST_ARRAY:
                        raise InputError(
                            f"{path} is a JSON array of more than {_LONGEST_ARRAY} bytes: write "
                            "one object a line"
                        )
                rows = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_marked)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{path} starts like a JSON array but cannot be read: {error}"
                ) from error
            for number, row in enumerate(rows, start=1):
                twice = _twice_in(row)
                yield number, row if twice is None else Unusable(_given_twice(twice))
            return
        file.seek(0)
        for number, read in enumerate(_lines(file), start=1):
            if read is None:
                yield number, Unusable(f"a line of more than {_LONGEST_LINE} bytes")
                continue
            if number == 1:
                read = read.removeprefix(b"\xef\xbb\xbf")
            if read.strip():
                yield number, _json_row(read)


def _lines(file: Any) -> Iterator[bytes | None]:
    """Lines of a file; None for one that is too long to be held."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) < _LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE)
        yield None


def _json_row(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        return Unusable("not UTF-8: save the file as UTF-8")
    except _Twice as error:
        return Unusable(_given_twice(str(error)))
    except (ValueError, RecursionError):
        return Unusable("not JSON: one object or string a line")


class _Twice(ValueError):
    pass


def _given_twice(key: str) -> str:
    return f"key {key} is given twice"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


def _marked(pairs: list[tuple[str, Any]]) -> Any:
    """An object; in the place of one that gives a key twice, what says so."""
    try:
        return _once(pairs)
    except _Twice as error:
        return error


def _twice_in(value: Any) -> str | None:
    """The key that an object anywhere in a value gives twice; None where there is none."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, _Twice):
            return str(one)
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return None
