"""The clock over a ledger: warns about a send that is not taken, and ends one that never will be.

It is a thread of its own because the thread that drains gloo sends cannot have a time-out: a gloo wait that
times out closes every connection of the group, also for a receiver that was merely slow.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Stuck", "Watcher"]

logger = logging.getLogger("vllm.pp_plugin")


@dataclasses.dataclass(frozen=True)
class Stuck:
    """The oldest send in flight.

    Attributes:
        send: The ledger's record of it.
        what: Peer, names, bytes and age, as text.
        age_s: Seconds since it was posted.
        stuck_s: Seconds without any progress of the group.
        pending: Number of sends in flight.
    """

    send: Any
    what: str
    age_s: float
    stuck_s: float
    pending: int


class Watcher:
    """Looks at the oldest send now and then; sleeps while there is none.

    Args:
        name: The group's name.
        warn_s: Age in seconds at which a send is logged, once, and at most one a ``warn_s``.
        deadline_s: Seconds without progress after which ``on_deadline`` is called, once.
        oldest: Returns the oldest send, or None.
        thread_started: Called first in the thread.
        on_deadline: Ends the group; False if the send was taken in that very moment.
    """

    def __init__(
        self,
        name: str,
        warn_s: float,
        deadline_s: float,
        oldest: Callable[[], Stuck | None],
        on_deadline: Callable[[Stuck], bool],
        thread_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._warn_s = warn_s
        self._deadline_s = deadline_s
        self._oldest = oldest
        self._on_deadline = on_deadline
        self._thread_started = thread_started
        self._tick_s = min(1.0, max(0.01, min(warn_s, deadline_s) / 4))
        self._busy = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it is not there yet."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name=f"pp-send-watch[{self._name}]", daemon=True)
        thread.start()
        self._thread = thread

    def wake(self) -> None:
        """There is something to watch. Costs nothing while the thread is watching already."""
        if not self._busy.is_set():
            self._busy.set()

    def stop(self, patience_s: float = 5.0) -> None:
        """End the thread, from whatever thread; one that hangs in an abort is left after ``patience_s``."""
        self._stopped.set()
        self._busy.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience_s)

    def _run(self) -> None:
        self._thread_started()
        warned: Any = None
        warned_at = float("-inf")
        while True:
            self._busy.wait()
            if self._stopped.is_set():
                return
            while (stuck := self._oldest()) is not None:
                now = time.monotonic()
                if stuck.stuck_s >= self._deadline_s and self._on_deadline(stuck):
                    return
                due = stuck.send is not warned and now - warned_at >= self._warn_s
                if stuck.age_s >= self._warn_s and due:
                    warned, warned_at = stuck.send, now
                    logger.warning(
                        "group %s: %s, is not taken yet; %d sends in flight, nothing moved for %.1f s",
                        self._name,
                        stuck.what,
                        stuck.pending,
                        stuck.stuck_s,
                    )
                if self._stopped.wait(self._tick_s):
                    return
            self._busy.clear()
            # Posted, or stopped, between the last look and the clearing.
            if self._stopped.is_set() or self._oldest() is not None:
                self._busy.set()
