"""The cache against a plain list of entries per row."""

import pytest
import torch

from drafttrain.nn.cache import KVCache
from tests.messages import said


def entries(values, rows):
    """(b s) numbers -> keys (b 1 s 1)."""
    return torch.tensor(values, dtype=torch.float32)[
        :, None, :, None
    ], None if rows is None else rows


def keys(cache, row, upto=None):
    return cache.keys[0][row, 0, : upto or int(cache.lengths[row]), 0].tolist()


def write(cache, values):
    block, _ = entries(values, None)
    return cache.update(block, -block, 0)


def test_rows_grow_after_their_own_lengths():
    cache = KVCache(2, 8)
    write(cache, [[1, 2, 3], [4, 5, 0]])
    cache.commit(torch.tensor([3, 2]))
    used, _ = write(cache, [[10, 11], [20, 21]])
    assert used.shape[2] == 5
    cache.commit(torch.tensor([2, 1]))
    assert keys(cache, 0) == [1, 2, 3, 10, 11]
    assert keys(cache, 1) == [4, 5, 20]
    assert torch.equal(cache.values[0], -cache.keys[0])


def test_advancing_commits_what_was_written_in_every_row():
    one, other = KVCache(2, 8), KVCache(2, 8)
    for cache in (one, other):
        write(cache, [[1, 2, 3], [4, 5, 0]])
        cache.commit(torch.tensor([3, 2]))
        write(cache, [[10, 11], [20, 21]])
    one.advance(2)
    other.commit(torch.tensor([2, 2]))
    for cache in (one, other):
        used, _ = write(cache, [[12], [22]])
        assert used.shape[2] == 6 and (cache.longest, cache.shortest) == (5, 4)
    assert torch.equal(one.lengths, other.lengths) and torch.equal(one.keys[0], other.keys[0])


def test_commit_moves_the_accepted_path_together():
    cache = KVCache(2, 10)
    write(cache, [[1, 2], [3, 0]])
    cache.commit(torch.tensor([2, 1]))
    write(cache, [[10, 11, 12, 13], [20, 21, 22, 23]])
    cache.commit(torch.tensor([3, 2]), torch.tensor([[0, 2, 3], [0, 3, -1]]))
    assert keys(cache, 0) == [1, 2, 10, 12, 13]
    assert keys(cache, 1) == [3, 20, 23]


def test_new_entries_of_some_layers_are_put_into_another_order():
    cache = KVCache(2, 8)
    for layer in range(2):
        cache.update(*(sign * entries([[1, 2], [3, 0]], None)[0] for sign in (1, -1)), layer)
    cache.commit(torch.tensor([2, 1]))
    for layer in range(2):
        cache.update(
            *(sign * entries([[10, 11, 12], [20, 21, 22]], None)[0] for sign in (1, -1)), layer
        )
    cache.arrange(torch.tensor([[0, 2, 1], [2, 0, 1]]), [0])
    assert cache.lengths.tolist() == [2, 1]
    assert keys(cache, 0, 5) == [1, 2, 10, 12, 11] and keys(cache, 1, 4) == [3, 22, 20, 21]
    assert torch.equal(cache.values[0], -cache.keys[0])
    assert cache.keys[1][0, 0, :5, 0].tolist() == [1, 2, 10, 11, 12] and cache.keys[1][
        1, 0, :4, 0
    ].tolist() == [3, 20, 21, 22]


def test_mask_shows_the_prefix_and_the_ancestors_only():
    cache = KVCache(2, 10)
    write(cache, [[1, 2, 3], [4, 0, 0]])
    cache.commit(torch.tensor([3, 1]))
    tree_mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    mask = cache.mask(tree_mask)
    assert mask.shape == (2, 1, 3, 6)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert mask[1, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize("lengths", [[3, 3], [3, 1]])
def test_mask_over_scratch_of_earlier_passes(lengths):
    cache = KVCache(2, 10)
    write(cache, [[1, 2, 3], [4, 5, 6]])
    cache.commit(torch.tensor(lengths))
    write(cache, [[7, 8], [9, 10]])
    cache.set_lengths(cache.lengths + 2)  # scratch, to be taken back
    # One new token over two scratch entries.
    mask = cache.mask(torch.tensor([[[True, False, True]]]))
    for row, length in enumerate(lengths):
        seen = mask[row, 0, 0].nonzero().flatten().tolist()
        assert seen == [*range(length), length, length + 2]


def test_select_and_assign_rows():
    cache = KVCache(3, 6)
    write(cache, [[1, 2], [3, 4], [5, 6]])
    cache.commit(torch.tensor([2, 1, 2]))
    cache.select(torch.tensor([2, 0]))
    assert keys(cache, 0) == [5, 6] and keys(cache, 1) == [1, 2]
    other = KVCache(1, 3)
    write(other, [[7, 8, 9]])
    other.commit(torch.tensor([3]))
    cache.assign(torch.tensor([1]), other)
    assert keys(cache, 0) == [5, 6] and keys(cache, 1) == [7, 8, 9]


def test_overflow_is_an_error():
    cache = KVCache(1, 2)
    with pytest.raises(ValueError, match=said("nn.cache_full")):
        write(cache, [[1, 2, 3]])
