"""``DeviceCommunicatorBase.__init__``: a pipeline group's communicator becomes one of ours."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from vllm_pp_plugin.comm.communicator import AsyncSendMixin, compose
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.errors import FeatureUnavailableError, HookError
from vllm_pp_plugin.hookspecs import device_backend
from vllm_pp_plugin.seams.seam import Seam, SeamInfo

__all__ = ["communicator_init"]

logger = logging.getLogger("vllm.pp_plugin")


def communicator_init(config: Callable[[], PluginConfig]) -> Seam:
    """The seam; ``config()`` is asked when a group is built."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            name = signature.bind(self, *args, **kwargs).arguments.get("unique_name", "")
            if name.split(":")[0] != "pp" or _is_stateless(self.cpu_group):
                return
            try:
                backend = device_backend(self.device.type)
                if not isinstance(self, AsyncSendMixin):
                    self.__class__ = compose(self.__class__, backend.communicator_name)
            except (HookError, TypeError) as exc:  # TypeError: a class whose objects cannot change class
                if config().async_sends is True:
                    raise FeatureUnavailableError(f"async_sends was asked for: {exc}") from exc
                logger.warning("async_sends steps aside on group %s: %s", name, exc)
                return
            self.open_pp_channel(backend, config())

        return __init__

    return Seam(
        SeamInfo(
            target="vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase.__init__",
            feature="async_sends",
            why="A platform names one communicator class for all groups, and vllm-ascend builds its own class "
            "directly in its GroupCoordinator; only the pipeline group's object may change.",
            how="Where the group's name is pp:*, the object's class becomes a subclass of its own class (with "
            "AsyncSendMixin), as soon as its base is initialised.",
            versions="0.23.0 and later",
            removal="when vLLM lets a plugin name the communicator class of one group",
        ),
        parameters=("self", "cpu_group", "device", "device_group", "unique_name"),
        make=make,
    )


def _is_stateless(group: Any) -> bool:
    """Whether a group is unknown to torch.distributed; such groups have a send path of their own."""
    from torch.distributed.distributed_c10d import _world

    return group not in _world.pg_map
