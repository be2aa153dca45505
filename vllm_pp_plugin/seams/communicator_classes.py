"""The composed communicator classes under importable names, for platforms that name a communicator by a string.

The plugin itself does not need them: it composes from whatever class a pipeline group's communicator has. A platform
plugin that prefers to name the class itself returns, for example,
``"vllm_pp_plugin.seams.communicator_classes.CpuPPCommunicator"`` from ``get_device_communicator_cls``; groups other
than the pipeline's then behave as with the platform's own class.
"""

from __future__ import annotations

import importlib

from vllm_pp_plugin.comm.communicator import compose

_PLATFORM_CLASSES = {
    "Cpu": "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
    "Cuda": "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator",
    "Npu": "vllm_ascend.distributed.device_communicators.npu_communicator:NPUCommunicator",
    "Xpu": "vllm.distributed.device_communicators.xpu_communicator:XpuCommunicator",
}


def __getattr__(name: str) -> type:
    prefix = name.removesuffix("PPCommunicator")
    if prefix == name or prefix not in _PLATFORM_CLASSES:
        names = ", ".join(f"{known}PPCommunicator" for known in _PLATFORM_CLASSES)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {names}")
    module, platform_class = _PLATFORM_CLASSES[prefix].split(":")
    return compose(getattr(importlib.import_module(module), platform_class), prefix)
