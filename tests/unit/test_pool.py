"""Host memory that private copies use again."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_pp_plugin.devices.pool import BufferPool, size_class

MIB = 1 << 20


@given(st.integers(1, 1 << 40))
def test_size_class_is_large_enough_and_wastes_little(nbytes: int) -> None:
    """A class is its own class, so a block that comes back is found again."""
    rounded = size_class(nbytes)
    assert nbytes <= rounded <= nbytes + max(nbytes // 4, 1)
    assert size_class(rounded) == rounded


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 30))
def test_size_classes_keep_the_order(left: int, right: int) -> None:
    """More bytes never get a smaller block."""
    if left <= right:
        assert size_class(left) <= size_class(right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(300_000,), (1000, 333), (7, 11, 4001)])
def test_copy_is_equal_contiguous_and_independent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of a view too."""
    pool = BufferPool(64 * MIB)
    source = torch.randint(0, 2, shape).to(dtype)
    for tensor in (source, source.transpose(0, -1), source[1:]):
        expected = tensor.clone()
        copy = pool.copy_of(tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() != tensor.data_ptr()
        tensor.fill_(1)
        assert torch.equal(copy, expected)


def test_memory_is_used_again() -> None:
    """The block of a copy that was given back, also for another dtype and a size of the same class."""
    pool = BufferPool(64 * MIB)
    first = pool.copy_of(torch.zeros(MIB))
    address = first.data_ptr()
    pool.give_back([first])
    assert pool.free_bytes == size_class(4 * MIB)
    second = pool.copy_of(torch.ones(2 * MIB - 5, dtype=torch.bfloat16))
    assert second.data_ptr() == address
    assert pool.free_bytes == 0
    assert bool((second == 1).all())


def test_a_copy_in_use_is_never_handed_out() -> None:
    """Only what was given back is free."""
    pool = BufferPool(64 * MIB)
    copies = [pool.copy_of(torch.full((MIB,), float(i))) for i in range(4)]
    assert len({copy.data_ptr() for copy in copies}) == 4
    assert [float(copy[0]) for copy in copies] == [0.0, 1.0, 2.0, 3.0]


def test_small_copies_are_left_to_malloc() -> None:
    """They are not kept."""
    pool = BufferPool(64 * MIB)
    pool.give_back([pool.copy_of(torch.ones(100))])
    assert pool.free_bytes == 0


def test_what_is_kept_is_bounded_and_the_oldest_size_goes() -> None:
    """Sizes that are no longer used make room for those that are."""
    pool = BufferPool(10 * MIB)
    old, new = pool.copy_of(torch.ones(MIB)), pool.copy_of(torch.ones(2 * MIB))
    pool.give_back([old])
    pool.give_back([new])
    assert pool.free_bytes == 8 * MIB
    address = new.data_ptr()
    assert pool.copy_of(torch.ones(2 * MIB)).data_ptr() == address
    huge = pool.copy_of(torch.ones(4 * MIB))
    pool.give_back([huge])
    assert pool.free_bytes == 0, "a block larger than the bound is not kept"


def test_many_threads() -> None:
    """No block is in two hands at once."""
    pool, wrong = BufferPool(8 * MIB), []

    def work(number: int) -> None:
        for turn in range(50):
            copy = pool.copy_of(torch.full((40_000,), float(number * 1000 + turn)))
            if not bool((copy == number * 1000 + turn).all()):
                wrong.append((number, turn))
            pool.give_back([copy])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.free_bytes <= 8 * MIB
