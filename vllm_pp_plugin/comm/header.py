"""What goes ahead of a message's tensors: the length of the pickled metadata, and the pickle."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Header", "HeaderCache"]


@dataclasses.dataclass(frozen=True)
class Header:
    """The two host tensors, read by the transport and never written again, so sends may share them.

    Attributes:
        length: One int64: bytes of the pickle.
        pickled: The pickle, uint8.
    """

    length: torch.Tensor
    pickled: torch.Tensor

    @classmethod
    def of(cls, metadata: Any) -> Header:
        """Pickle what the receiver will unpickle first."""
        pickled = torch.frombuffer(bytearray(pickle.dumps(metadata)), dtype=torch.uint8)
        # Named, since a model runner may have made its device the default one.
        return cls(torch.tensor([pickled.numel()], dtype=torch.long, device="cpu"), pickled)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.length.nbytes + self.pickled.nbytes)


class HeaderCache:
    """Headers of messages that hold nothing but tensors, by names, dtypes, shapes and devices.

    Steps of a pipeline repeat their shapes, and describing and pickling them again costs as much as the posting.

    Args:
        describe: Makes the metadata of a message (vLLM's own function).
        most: Headers to keep; when full, all are dropped (shapes have changed by then).
    """

    def __init__(self, describe: Callable[[dict[str, Any]], Any], most: int = 256) -> None:
        self._describe = describe
        self._most = most
        self._headers: dict[tuple[Any, ...], Header] = {}

    def of(self, message: dict[str, Any]) -> Header:
        """The header of a message."""
        if not all(isinstance(value, torch.Tensor) for value in message.values()):
            return Header.of(self._describe(message))
        key = tuple((name, t.dtype, t.shape, t.device.type) for name, t in message.items())
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) >= self._most:
                self._headers.clear()
            header = self._headers[key] = Header.of(self._describe(message))
        return header
