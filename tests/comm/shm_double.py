"""A double of the shared-memory operators that vLLM's CPU extension has on AVX-512 hosts.

It speaks the operators' own signatures (``torch.ops._C.init_shm_manager`` and its kin, as
``vllm/distributed/device_communicators/cpu_communicator.py`` calls them) and is blocking, as they are. Messages
travel on a gloo group of its own. Not run on such a host: nobody here has one.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
import torch.distributed as dist

CALLS: Counter[str] = Counter()
_OPERATORS = ("init_shm_manager", "join_shm_manager", "shm_send_tensor_list", "shm_recv_tensor_list")
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def init_shm_manager(name: str, group_size: int, rank: int, thread_num: int) -> int:
    CALLS["init"] += 1
    assert name.endswith("-cpushm") and group_size == dist.get_world_size()
    return 7


def join_shm_manager(handle: int, name: str) -> str:
    assert handle == 7
    return name


def shm_send_tensor_list(handle: int, tensors: list[torch.Tensor], dst: int) -> None:
    CALLS["send"] += 1
    dist.send(torch.tensor([len(tensors)]), dst)
    for tensor in tensors:
        dist.send(torch.tensor([tensor.numel(), _DTYPES.index(tensor.dtype)]), dst)
        dist.send(tensor.contiguous().reshape(-1), dst)


def shm_recv_tensor_list(handle: int, src: int) -> list[torch.Tensor]:
    CALLS["receive"] += 1
    count = torch.empty(1, dtype=torch.long)
    dist.recv(count, src)
    tensors = []
    for _ in range(int(count)):
        facts = torch.empty(2, dtype=torch.long)
        dist.recv(facts, src)
        flat = torch.empty(int(facts[0]), dtype=_DTYPES[int(facts[1])])
        dist.recv(flat, src)
        tensors.append(flat)
    return tensors


def install() -> None:
    """Put the operators where vLLM looks for them."""
    os.environ["VLLM_DIST_IDENT"] = "double"
    CALLS.clear()
    for name in _OPERATORS:
        setattr(torch.ops._C, name, globals()[name])


def remove() -> None:
    """Take them away again."""
    for name in _OPERATORS:
        if name in vars(torch.ops._C):
            delattr(torch.ops._C, name)
