"""Rows joined into sequences of one length, one after the other, so that little is padding.

There is little to gain over batches by `trainer.batch_tokens`, which hold rows of like lengths, so
that padding takes less than a tenth; and with a dense mask attention computes the full sequence,
most of it for nothing. It is for kernels that skip blocks and want one shape.
`scripts/bench/packing.py` measures what it costs or saves on a machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.flow import Batch, Packing


def join(rows: Sequence[tuple[Tensor, Tensor, int]], sequence: int) -> Batch:
    """Lay rows into sequences in their order, a new one where the next row does not fit.

    Args:
        rows: (ids (s) int64, loss mask (s) bool, number of the row in its set) of each row; none
            longer than a sequence. A row's first token is no label, since nothing of its own row
            precedes it.
        sequence: tokens of each.
    """
    starts: list[tuple[int, int]] = []
    number, used = 0, 0
    for ids, _, _ in rows:
        if used + len(ids) > sequence:
            number, used = number + 1, 0
        starts.append((number, used))
        used += len(ids)
    shape = (number + 1, sequence)
    input_ids, loss_mask = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
    )
    documents, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for document, ((place, start), (ids, mask, _)) in enumerate(zip(starts, rows, strict=True)):
        part = slice(start, start + len(ids))
        input_ids[place, part], loss_mask[place, part] = ids, mask
        documents[place, part], positions[place, part] = document, torch.arange(len(ids))
    numbers = torch.tensor([row for _, _, row in rows], dtype=torch.int64)
    return Batch(
        input_ids,
        loss_mask,
        (documents >= 0).sum(1),
        numbers,
        packing=Packing(documents, positions),
    )


def taken_apart(values: Tensor, batch: Batch) -> list[Tensor]:
    """(b s d) of a batch's tokens -> (n d) of each row, in the order of `row_ids`."""
    lengths = batch.row_lengths.tolist()
    if batch.packing is None:
        return [value[:n] for value, n in zip(values, lengths, strict=True)]
    real = batch.packing.document_ids.to(values.device) >= 0
    return list(values[real].split(lengths))


def laid_out(rows: Sequence[Tensor], batch: Batch) -> Tensor:
    """(n d) of each row, in the order of `row_ids` -> (b s d) as the batch has them, zeros on
    padding."""
    b, s = batch.input_ids.shape
    out = rows[0].new_zeros(b, s, rows[0].shape[1])
    if batch.packing is None:
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
    else:
        out[batch.packing.document_ids.to(out.device) >= 0] = torch.cat(list(rows))
    return out
