"""Every exception this package raises on purpose.

::

    PPPluginError
      x ConfigError                 (also a ValueError) a setting is unknown or out of range
      x FeatureUnavailableError     a feature was asked for by name and cannot be had here
      x SeamError                   a part of vLLM does not look as the plugin expects
      x HookError                   a vendor's plugin failed
      x SendError                   a pipeline send; carries the peer, the tensors' names and the age
          x SendFailedError         the transport reported an error (usually: the peer is gone)
          x SendDeadlineError       the peer took nothing within ``send_deadline_s``
          x DrainTimeoutError       sends were still in flight when a drain's deadline passed
          x ChannelClosedError      a send after the group was destroyed

One ``except PPPluginError`` catches them all. Each message names the setting or the peer, the value,
what is allowed, and the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "ChannelClosedError",
    "ConfigError",
    "DrainTimeoutError",
    "FeatureUnavailableError",
    "HookError",
    "PPPluginError",
    "SeamError",
    "SendDeadlineError",
    "SendError",
    "SendFailedError",
]


class PPPluginError(Exception):
    """Base class of all errors of this package."""


class ConfigError(PPPluginError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class FeatureUnavailableError(PPPluginError):
    """A feature that was asked for by name cannot be had on this vLLM or device."""


class SeamError(PPPluginError):
    """A class or method of vLLM is missing or has another shape than the one the plugin wraps."""


class HookError(PPPluginError):
    """A vendor's plugin raised, or returned what the hook does not allow."""


class SendError(PPPluginError):
    """A pipeline send did not go well.

    Attributes:
        peer: Global rank of the receiver, or None where no single send is meant.
        keys: Names of the tensors that were sent.
        age_s: Seconds since the send was posted, when the error was raised first.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        keys: tuple[str, ...] = (),
        age_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.keys = keys
        self.age_s = age_s

    def anew(self) -> Self:
        """The same error as a new object: one that is raised twice grows a traceback of both."""
        return type(self)(str(self), peer=self.peer, keys=self.keys, age_s=self.age_s)


class SendFailedError(SendError):
    """The transport reported an error for an earlier send."""


class SendDeadlineError(SendError):
    """Nothing was taken by the receiver for ``send_deadline_s``."""


class DrainTimeoutError(SendError):
    """Sends were still in flight when the deadline of a drain passed."""


class ChannelClosedError(SendError):
    """A send was posted after its group had been destroyed."""
