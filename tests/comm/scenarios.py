"""What the ranks of the communication tests do."""

from __future__ import annotations

import time

import torch

from tests.support.groups import barrier, equal, plugin_group


def smoke():
    with plugin_group() as g:
        out = type(g.device_communicator).__name__, g.device_communicator.pp_channel is not None
        if g.rank_in_group == 0:
            a = torch.arange(1 << 19, dtype=torch.float32)
            t0 = time.perf_counter()
            h = g.isend_tensor_dict({"h": a, "x": 3})
            blocked = time.perf_counter() - t0
            a.zero_()
            for x in h:
                x.wait()
                x.wait()
            barrier()
            return out, blocked, len(h)
        barrier()
        r = g.recv_tensor_dict()
        return out, equal(r, {"h": torch.arange(1 << 19, dtype=torch.float32), "x": 3})
