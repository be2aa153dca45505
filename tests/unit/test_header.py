"""Headers of messages: what the receiver unpickles, and when a pickle is used again."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from vllm_pp_plugin.comm.header import Header, HeaderCache


def describe(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Like vLLM's: names with dtype and shape, other values as they are."""
    return [(k, (v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else v) for k, v in message.items()]


def test_header_holds_the_pickle_and_its_length() -> None:
    """One int64 and uint8 bytes."""
    header = Header.of([("x", 1)])
    assert header.length.dtype is torch.int64
    assert header.length.tolist() == [header.pickled.numel()]
    assert pickle.loads(bytes(header.pickled.tolist())) == [("x", 1)]
    assert header.nbytes == 8 + header.pickled.numel()


def test_same_shapes_share_a_header() -> None:
    """Whatever the values are."""
    cache = HeaderCache(describe)
    first = cache.of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    assert cache.of({"a": torch.ones(2, 3), "b": torch.ones(4)}) is first


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)},
        {"b": torch.zeros(4), "a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "c": torch.zeros(4)},
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(4, device="meta")},
        {"a": torch.zeros(2, 3), "b": None},
        {},
    ],
    ids=["shape", "dtype", "order", "name", "fewer", "device", "value", "empty"],
)
def test_other_messages_do_not(other: dict[str, Any]) -> None:
    """Anything that the receiver must know makes another header, and the right one."""
    cache = HeaderCache(describe)
    first = cache.of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    header = cache.of(other)
    assert header is not first
    assert pickle.loads(bytes(header.pickled.tolist())) == describe(other)


def test_values_are_never_cached() -> None:
    """Two messages that differ in a value only."""
    cache = HeaderCache(describe)
    headers = [cache.of({"a": torch.zeros(1), "step": step}) for step in (1, 2)]
    assert [pickle.loads(bytes(h.pickled.tolist()))[1] for h in headers] == [("step", 1), ("step", 2)]


def test_the_cache_is_bounded() -> None:
    """It starts anew when full, and goes on answering rightly."""
    described = []

    def counted(message: dict[str, Any]) -> Any:
        described.append(tuple(message["a"].shape))
        return describe(message)

    cache = HeaderCache(counted, most=3)
    for size in (1, 2, 3, 1, 4, 1):
        header = cache.of({"a": torch.zeros(size)})
        assert pickle.loads(bytes(header.pickled.tolist())) == [("a", (torch.float32, (size,)))]
    assert described == [(1,), (2,), (3,), (4,), (1,)]
