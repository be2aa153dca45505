"""Random messages that sender and receiver make alike from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)

KINDS = (
    "overwrite",
    "drop and collect",
    "metadata only",
    "cpu tensors",
    "mixed",
    "non-contiguous",
    "empty",
    "0-dim",
)


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Random bits of a random dtype; NaNs are fine, messages are compared bit by bit."""
    dtype = dtype or rng.choice(DTYPES)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def _shape(rng: random.Random, most: int = 2000) -> tuple[int, ...]:
    if rng.random() < 0.03:
        return (rng.randrange(100_000, 300_000),)
    return (rng.randint(1, most), rng.randint(1, 8))


def _views(rng: random.Random) -> torch.Tensor:
    base = tensor(rng, (rng.randint(2, 40), rng.randint(2, 40)))
    kind = rng.randrange(5)
    if kind == 0:
        return base.t()
    if kind == 1:
        return base[:, ::2]
    if kind == 2:
        return base[1:, 1:]
    if kind == 3:
        return base[0].expand(3, -1)
    return base.unsqueeze(0).transpose(0, 2)


def _other(rng: random.Random) -> Any:
    return rng.choice([None, 7, "text", [1, 2, {"a": (3,)}], 1.5, True, {"k": b"bytes"}])


def message(kind: str, seed: int) -> dict[str, Any]:
    """The message number ``seed`` of a kind."""
    rng = random.Random(f"{kind}/{seed}")
    if kind == "metadata only":
        return {f"k{i}": _other(rng) for i in range(rng.randint(0, 4))}
    if kind == "cpu tensors":
        return {f"t{i}": tensor(rng, _shape(rng)) for i in range(rng.randint(1, 4))}
    if kind == "mixed":
        makers = [
            lambda: tensor(rng, _shape(rng, 200)),
            lambda: tensor(rng, ()),
            lambda: tensor(rng, (0, 5)),
            lambda: _views(rng),
            lambda: _other(rng),
        ]
        return {f"v{i}": rng.choice(makers)() for i in range(rng.randint(1, 6))}
    if kind == "non-contiguous":
        return {f"t{i}": _views(rng) for i in range(rng.randint(1, 3))}
    if kind == "empty":
        return {"a": tensor(rng, (0,)), "b": tensor(rng, (3, 0, 2)), "c": tensor(rng, (2,))}
    if kind == "0-dim":
        return {f"t{i}": tensor(rng, ()) for i in range(rng.randint(1, 4))}
    return {"hidden_states": tensor(rng, _shape(rng)), "residual": tensor(rng, _shape(rng))}


def overwrite(sent: dict[str, Any]) -> None:
    """Write over the whole storage of every tensor, as a model does with its buffers."""
    for value in sent.values():
        if isinstance(value, torch.Tensor):
            torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).fill_(0xA5)
