"""One rank of a :class:`tests.support.world.World`; started as ``python -m tests.support.rank``."""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Client

import torch
import torch.distributed as dist


def main(address: str, rank: int, size: int, folder: str) -> None:
    pipe = Client(address, family="AF_UNIX")
    pipe.send(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    while (order := pipe.recv()) is not None:
        scenario, kwargs = order
        module, function = scenario.split(":")
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(**kwargs)))
        except Exception as exc:  # noqa: BLE001 - handed to the test, which fails with it
            traceback.print_exc()
            pipe.send((False, f"{type(exc).__name__}: {exc}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
