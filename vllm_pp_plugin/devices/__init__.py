"""One file a device; each is a pluggy plugin that answers ``vllm_pp_device_backend`` for its device."""

from vllm_pp_plugin.devices.base import Completion, DeviceBackend, abort_gloo_group

__all__ = ["Completion", "DeviceBackend", "abort_gloo_group"]
