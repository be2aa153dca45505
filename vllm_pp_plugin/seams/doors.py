"""The two places where the plugin learns an engine's settings.

``register()`` runs before vLLM has a configuration, so it opens two doors that only read:
one where vLLM has just made its configuration (the process that starts the engine), one where a worker is
given it. Which features are on, and so which other seams are installed, is decided there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_pp_plugin.seams.seam import Seam, SeamInfo

__all__ = ["config_door", "worker_door"]


def config_door(passed: Callable[[Any], None]) -> Seam:
    """Calls ``passed(vllm_config)`` when an engine's configuration is made; what it raises stops the start."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = original(self, *args, **kwargs)
            passed(config)
            return config

        return create_engine_config

    return Seam(
        SeamInfo(
            target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
            feature="settings",
            why="Plugins are loaded before the configuration exists, and a wrong setting must stop the start "
            "with a clear error instead of failing in a worker.",
            how="Reads additional_config from the finished configuration; changes nothing.",
            versions="0.23.0 and later",
            removal="when vLLM hands its configuration to general plugins",
        ),
        parameters=("self", "usage_context"),
        make=make,
    )


def worker_door(passed: Callable[[Any, type], None]) -> Seam:
    """Calls ``passed(vllm_config, worker_class)`` before a worker is initialised."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            passed(kwargs["vllm_config"] if "vllm_config" in kwargs else args[0], type(self))
            original(self, *args, **kwargs)

        return __init__

    return Seam(
        SeamInfo(
            target="vllm.v1.worker.worker_base:WorkerBase.__init__",
            feature="settings",
            why="In a worker, plugins are loaded before set_current_vllm_config.",
            how="Reads additional_config and the worker's class, before the worker's device and groups exist; "
            "changes nothing. Takes itself out of a worker process in which nothing is on.",
            versions="0.23.0 and later",
            removal="when vLLM hands its configuration to general plugins",
        ),
        parameters=("self", "vllm_config"),
        make=make,
    )
