"""A preallocated key/value cache in which every row has its own length.

New entries are written after each row's length. `commit` makes the accepted ones permanent and
forgets the rest, so a batch may accept a different number of tokens in every row. It serves the
frozen target (it is a `transformers` Cache) and the drafters alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class KVCache(Cache):
    """Keys and values of some decoder layers, (b h capacity e) each, allocated at the first write.

    `lengths` (b) counts the committed entries of every row. A pass over s new tokens writes entries
    `lengths .. lengths + s` of each row; until `commit` is called they are scratch that the next
    pass overwrites.
    """

    is_compileable = False

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.layers: list = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.rows = rows
        self.capacity = capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.set_lengths(torch.zeros(rows, dtype=torch.int64, device=device))

    def set_lengths(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self._host = lengths.tolist()
        """The same numbers on the host: slices need them, and reading them from a device would mean
        waiting for it."""

    def advance(self, entries: int) -> None:
        """Commit that many more entries of every row, or fewer if negative. Does not wait for the
        device."""
        self.lengths = self.lengths + entries
        self._host = [length + entries for length in self._host]

    @property
    def longest(self) -> int:
        return max(self._host, default=0)

    @property
    def shortest(self) -> int:
        return min(self._host, default=0)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write s new entries after each row's length and return the part in use.

        Args:
            key_states, value_states: (b h s e).
        Returns: keys and values, (b h longest+s e); entries after a row's own length + s are not to
        be read.
        Raises: ValueError when the capacity is exceeded.
        """
        b, h, s, _ = key_states.shape
        used = self.longest + s
        if used > self.capacity:
            raise ValueError(
                f"the key/value cache holds {self.capacity} entries a row, {used} are needed"
            )
        while len(self.keys) <= layer_idx:
            self.keys.append(key_states.new_zeros(b, h, self.capacity, key_states.shape[-1]))
            self.values.append(value_states.new_zeros(b, h, self.capacity, value_states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.longest == self.shortest:
            keys[:, :, self.longest : used].copy_(key_states)
            values[:, :, self.longest : used].copy_(value_states)
        else:
            rows = torch.arange(b, device=keys.device)[:, None]
            places = self.lengths[:, None] + torch.arange(s, device=keys.device)  # b s
            keys[rows, :, places] = key_states.transpose(1, 2)  # indexed shape: b s h e
            values[rows, :, places] = value_states.transpose(1, 2)
        return keys[:, :, :used], values[:, :, :used]

    def mask(self, tree_mask: Tensor) -> Tensor:
        """Which of the entries in use each new token may read.

        Args:
            tree_mask: (b|1 s t) bool, t >= s: which of each row's last t entries, the s new ones
                included, each new token sees. Entries before them are all seen. With t > s, the
                entries lengths - (t - s) .. lengths are scratch of earlier passes (committed for
                now, to be taken back by `set_lengths`).
        Returns: (b 1 s longest+s) bool.
        """
        s, t = tree_mask.shape[-2:]
        used = self.longest + s
        if self.longest == self.shortest:
            mask = tree_mask.new_ones(self.rows, s, used)
            mask[:, :, used - t :] = tree_mask
            return mask[:, None]
        places = torch.arange(used, device=tree_mask.device)
        recent = places[None] - (self.lengths[:, None] - (t - s))  # b used, index in the last t
        inside = (recent >= 0) & (recent < t)
        index = recent.clamp(0, t - 1)[:, None].expand(-1, s, -1)  # b s used
        mask = tree_mask.expand(self.rows, -1, -1).gather(2, index) & inside[:, None]
        return (mask | (recent < 0)[:, None])[:, None]

    def commit(self, counts: Tensor, kept: Tensor | None = None) -> None:
        """Keep some of the new entries and forget the rest.

        Args:
            counts: (b) how many new entries each row keeps.
            kept: (b k) index, in the new entries, of the i-th kept one, in order; None keeps the
                first `counts`. Places at or after a row's count are not read (any value, -1
                included).
        """
        if kept is not None and kept.shape[1]:
            k = kept.shape[1]
            straight = torch.arange(k, device=kept.device)
            counted = straight[None] < counts[:, None]
            if bool(((kept != straight) & counted).any()):
                rows = torch.arange(self.rows, device=kept.device)[:, None]
                source = self.lengths[:, None] + torch.where(counted, kept, straight)
                goal = self.lengths[:, None] + straight
                # A row that keeps fewer than k entries copies scratch onto itself; clamp keeps that
                # inside the cache.
                end = self.capacity - 1
                source, goal = source.clamp(max=end), goal.clamp(max=end)
                for tensor in (*self.keys, *self.values):
                    tensor[rows, :, goal] = tensor[rows, :, source]
        self.set_lengths(self.lengths + counts)

    def arrange(self, order: Tensor, layers: Iterable[int]) -> None:
        """Put the new entries of some layers into another order; nothing is committed.

        Args:
            order: (b n) which of the new entries becomes the i-th. What is not named is lost.
        """
        straight = torch.arange(order.shape[1], device=order.device)
        if bool((order == straight).all()):
            return
        rows = torch.arange(self.rows, device=order.device)[:, None]
        source, goal = self.lengths[:, None] + order, self.lengths[:, None] + straight
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                tensor[rows, :, goal] = tensor[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keep only some rows, in the given order; rows may repeat."""
        self.keys = [tensor[rows] for tensor in self.keys]
        self.values = [tensor[rows] for tensor in self.values]
        self.rows = len(rows)
        self.set_lengths(self.lengths[rows])

    def assign(self, rows: Tensor, other: KVCache) -> None:
        """Replace some rows by those of another cache, in order; their old entries are
        forgotten."""
        used = other.longest
        while len(self.keys) < len(other.keys):
            like = other.keys[len(self.keys)]
            shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
            self.keys.append(like.new_zeros(shape))
            self.values.append(other.values[len(self.values)].new_zeros(shape))
        for mine, theirs in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            mine[rows, :, :used] = theirs[:, :, :used]
        lengths = self.lengths.clone()
        lengths[rows] = other.lengths
        self.set_lengths(lengths)

    # What `transformers` models may ask of a cache.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.longest + query_length, 0

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"KVCache(rows={self.rows}, capacity={self.capacity}, lengths={self._host})"
