"""The handles that a send returns to its caller."""

from __future__ import annotations

__all__ = ["SOURCE_REUSABLE", "SourceReusable"]


class SourceReusable:
    """Says what ``MPI_Wait`` on a send says: the source may be reused. It may, from the start.

    vLLM's workers wait for the previous step's handles before they run the next forward, because stock sends
    read from the model's own buffers. A send of this package reads from a private copy, so there is nothing
    to wait for; whether the peer has taken the message is the ledger's business.
    """

    __slots__ = ()

    def is_completed(self) -> bool:
        """Always true: the source is free."""
        return True

    def wait(self) -> None:
        """Return at once, however often it is called."""


SOURCE_REUSABLE = SourceReusable()
