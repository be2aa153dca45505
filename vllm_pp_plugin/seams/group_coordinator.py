"""``GroupCoordinator``: sends and teardown are handed to the communicator where it is ours.

The three methods have kept their shape from vLLM 0.23.0 to 0.32.0. Receiving is stock's: the wire format is
the same in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_pp_plugin.comm.communicator import AsyncSendMixin, sends
from vllm_pp_plugin.comm.header import HeaderCache
from vllm_pp_plugin.seams.seam import Seam, SeamInfo

__all__ = ["destroy", "isend_tensor_dict", "send_tensor_dict"]

_MODULE = "vllm.distributed.parallel_state"
_NEEDS = (f"{_MODULE}:_split_tensor_dict", f"{_MODULE}:GroupCoordinator._should_use_all_gather")
_SEND_PARAMETERS = ("self", "tensor_dict", "dst", "all_gather_group", "all_gather_tensors")


def _describe(message: dict[str, Any]) -> Any:
    from vllm.distributed.parallel_state import _split_tensor_dict

    return _split_tensor_dict(message)[0]


_headers = HeaderCache(_describe)


def _parts(
    group: Any,
    message: dict[str, Any],
    all_gather_group: Any | None,
    all_gather_tensors: dict[str, bool] | None,
) -> list[tuple[str, torch.Tensor]]:
    """The tensors (or this rank's slices) that are not empty.

    Which ones are sliced is asked of vLLM's own rule, since the receiver uses it too.
    """
    parts = []
    for key, tensor in message.items():
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            continue
        if all_gather_group is not None and group._should_use_all_gather(
            key, tensor.numel(), all_gather_group, all_gather_tensors
        ):
            tensor = tensor.reshape(all_gather_group.world_size, -1)[all_gather_group.rank_in_group]
        parts.append((key, tensor))
    return parts


def _destination(group: Any, dst: int | None) -> int:
    if dst is None:
        return int((group.rank_in_group + 1) % group.world_size)
    if not 0 <= dst < group.world_size or dst == group.rank_in_group:
        raise ValueError(
            f"cannot send to rank {dst} of group {group.unique_name}: it has ranks 0 to {group.world_size - 1} "
            f"and this is rank {group.rank_in_group}"
        )
    return dst


def isend_tensor_dict() -> Seam:
    """Sends without waiting."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def isend_tensor_dict(
            self: Any,
            tensor_dict: dict[str, Any],
            dst: int | None = None,
            all_gather_group: Any | None = None,
            all_gather_tensors: dict[str, bool] | None = None,
        ) -> list[Any]:
            communicator = getattr(self, "device_communicator", None)
            if self.world_size <= 1 or not sends(communicator):
                # As it is: stock's send_tensor_dict looks for this very list among its pending sends.
                handles: list[Any] = original(self, tensor_dict, dst, all_gather_group, all_gather_tensors)
                return handles
            parts = _parts(self, tensor_dict, all_gather_group, all_gather_tensors)
            return list(communicator.pp_isend(_headers.of(tensor_dict), parts, _destination(self, dst)))

        return isend_tensor_dict

    return Seam(
        SeamInfo(
            target=f"{_MODULE}:GroupCoordinator.isend_tensor_dict",
            feature="async_sends",
            why="Up to 0.28 the metadata is sent blocking; from 0.29 on sends read the model's own buffers, so "
            "the worker waits for them, metadata-only sends are dropped while gloo still reads them, and "
            "nothing bounds or reports what is in flight.",
            how="Posts private copies through the communicator's channel; the handles' wait() returns at once.",
            versions="0.23.0 and later",
            removal="when upstream's sends keep private copies, are bounded, and have a deadline",
        ),
        parameters=_SEND_PARAMETERS,
        make=make,
        exact=True,
        needs=_NEEDS,
    )


def send_tensor_dict() -> Seam:
    """Sends, and returns when the peer has taken the message."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def send_tensor_dict(
            self: Any,
            tensor_dict: dict[str, Any],
            dst: int | None = None,
            all_gather_group: Any | None = None,
            all_gather_tensors: dict[str, bool] | None = None,
        ) -> dict[str, Any] | None:
            communicator = getattr(self, "device_communicator", None)
            if self.world_size <= 1 or not sends(communicator):
                result: dict[str, Any] | None = original(self, tensor_dict, dst, all_gather_group, all_gather_tensors)
                return result
            parts = _parts(self, tensor_dict, all_gather_group, all_gather_tensors)
            communicator.pp_send(_headers.of(tensor_dict), parts, _destination(self, dst))
            return None

        return send_tensor_dict

    return Seam(
        SeamInfo(
            target=f"{_MODULE}:GroupCoordinator.send_tensor_dict",
            feature="async_sends",
            why="Stock's waits for the handles of isend_tensor_dict, which no longer wait for the peer.",
            how="Waits in the ledger until the peer has taken the message, so nothing stays in flight.",
            versions="0.23.0 and later",
            removal="with isend_tensor_dict",
        ),
        parameters=_SEND_PARAMETERS,
        make=make,
        exact=True,
        needs=_NEEDS,
    )


def destroy() -> Seam:
    """Drains before the process groups go."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(self: Any, *args: Any, **kwargs: Any) -> Any:
            communicator = getattr(self, "device_communicator", None)
            if isinstance(communicator, AsyncSendMixin):
                communicator.close_pp_channel()
            return original(self, *args, **kwargs)

        return destroy

    return Seam(
        SeamInfo(
            target=f"{_MODULE}:GroupCoordinator.destroy",
            feature="async_sends",
            why="vLLM up to 0.28 destroys the process groups before the communicator; a send in flight would "
            "lose its buffers while the transport reads them.",
            how="Closes the channel first: drained, or ended at drain_deadline_s.",
            versions="0.23.0 and later",
            removal="with isend_tensor_dict",
        ),
        parameters=("self",),
        make=make,
    )
