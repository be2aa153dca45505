"""Who owns a send's buffers, and until when.

One ledger per group holds every send in flight: its works, the tensors they read, and who they are for.
A thread drains it in order; :mod:`vllm_pp_plugin.comm.watcher` looks at the clock. Nothing here knows torch:
a work is anything with ``wait()`` and ``is_completed()``.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vllm_pp_plugin.comm.watcher import Stuck, Watcher
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.base import Completion
from vllm_pp_plugin.errors import (
    ChannelClosedError,
    DrainTimeoutError,
    SendDeadlineError,
    SendError,
    SendFailedError,
)

__all__ = ["LedgerStats", "PendingSend", "SendLedger", "Work"]

logger = logging.getLogger("vllm.pp_plugin")

# Device works are polled: often at first, since most are over at once, then less and less.
_POLL_FIRST_S = 0.0002
_POLL_MOST_S = 0.005
# After an abort the drain thread gets this long to see its wait end.
_ABORT_GRACE_S = 5.0


class Work(Protocol):
    """What ``torch.distributed.isend`` returns."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


@dataclasses.dataclass(eq=False)
class PendingSend:
    """One message in flight.

    Attributes:
        peer: Global rank of the receiver.
        keys: Names of the tensors in it.
        nbytes: Bytes that are retained for it.
        works: What the transport returned, with the rule by which each completes.
        retained: Everything the transport reads from; kept until all works are over.
        posted_at: ``time.monotonic()`` when it was posted (or, while it is being posted, begun), in seconds.
        recycle: Called once all works are over, unless one failed; e.g. gives buffers back to a pool.
        posted: Whether all of it was handed to the transport.
        done: Whether all works are over, well or not.
    """

    peer: int
    keys: tuple[str, ...]
    nbytes: int
    works: list[tuple[Completion, Work]] = dataclasses.field(default_factory=list)
    retained: list[Any] = dataclasses.field(default_factory=list)
    posted_at: float = 0.0
    recycle: Callable[[], None] | None = None
    posted: bool = False
    done: bool = False

    @property
    def names(self) -> str:
        """The tensors' names, for messages."""
        return ", ".join(map(str, self.keys))

    def describe(self, now: float) -> str:
        """E.g. ``send to rank 3 (hidden_states, residual; 4194304 bytes), 12.0 s old``."""
        stage = "" if self.posted else ", still being posted"
        what = f"{self.names or 'metadata only'}; {self.nbytes} bytes"
        return f"send to rank {self.peer} ({what}), {now - self.posted_at:.1f} s old{stage}"


@dataclasses.dataclass(frozen=True)
class LedgerStats:
    """Counters of one ledger. Times are in seconds, sizes in bytes."""

    sends: int
    pending: int
    retained_bytes: int
    peak_pending: int
    peak_retained_bytes: int
    back_pressure_waits: int
    back_pressure_s: float
    oldest_s: float


class SendLedger:
    """FIFO of the sends in flight of one group.

    Args:
        name: The group's name, for messages and threads.
        config: Bounds and times.
        abort: Ends everything pending on the group, so that a blocked ``wait()`` returns. Called at most once.
        thread_started: Called first in each of the ledger's threads.
    """

    def __init__(
        self,
        name: str,
        config: PluginConfig,
        abort: Callable[[], None],
        thread_started: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._config = config
        self._abort = abort
        self._thread_started = thread_started
        self._close_result: DrainTimeoutError | None = None
        self._changed = threading.Condition()
        self._queue: deque[PendingSend] = deque()
        self._posting: deque[PendingSend] = deque()
        self._line: deque[PendingSend] = deque()
        self._bytes = 0
        self._last_progress = time.monotonic()
        self._failure: SendError | None = None
        self._aborted = False
        self._closed = False
        self._drainer: threading.Thread | None = None
        self._watcher = Watcher(
            name, config.send_warn_s, config.send_deadline_s, self._stuck_send, self._on_deadline, thread_started
        )
        self._sends = self._peak_pending = self._peak_bytes = self._pressure_waits = 0
        self._pressure_s = 0.0

    # -- posting ---------------------------------------------------------------------------------------

    @contextmanager
    def admit(self, peer: int, keys: tuple[str, ...], nbytes: int) -> Iterator[PendingSend]:
        """Make room for a message, and take over whatever was posted for it.

        The caller appends works and buffers to the yielded record. If it fails half-way, what it has posted
        so far is still in flight and is kept like any other send, and the group is unusable: the peer would
        take the next message for the rest of this one.

        Args:
            peer: Global rank of the receiver.
            keys: Names of the tensors.
            nbytes: Bytes that will be retained. A message larger than ``max_retained_bytes`` goes when
                nothing else is in flight.

        Raises:
            SendError: If an earlier send failed, or the ledger is closed.
        """
        send = PendingSend(peer, keys, nbytes)
        self._reserve(send)
        try:
            yield send
        except BaseException as exc:
            if send.works:
                # The text and not the exception: its traceback holds every caller's frame, and their tensors.
                self._fail(self._half_sent(send, exc), RuntimeError(f"{type(exc).__name__}: {exc}"))
            raise
        finally:
            with self._changed:
                self._posting.remove(send)
                if send.works:
                    send.posted, send.posted_at = True, time.monotonic()
                    if not self._queue:
                        self._last_progress = send.posted_at
                    self._queue.append(send)
                    self._sends += 1
                else:
                    self._bytes -= nbytes
                    send.done = True
                    send.retained.clear()
                self._changed.notify_all()

    def _half_sent(self, send: PendingSend, exc: BaseException) -> SendError:
        if isinstance(exc, SendError):
            return exc.anew()
        return SendFailedError(
            f"group {self.name}: a message to rank {send.peer} ({send.names}) was sent in part: "
            f"{type(exc).__name__}: {exc}. The peer is out of step; restart the engine",
            peer=send.peer,
            keys=send.keys,
        )

    def _reserve(self, send: PendingSend) -> None:
        with self._changed:
            self._raise_if_unusable()
            if self._line or self._is_full(send.nbytes):
                self._wait_for_room(send)
            self._start_threads()  # before anything is posted: an error here must not lose a send
            send.posted_at = time.monotonic()
            self._posting.append(send)
            self._bytes += send.nbytes
            self._peak_pending = max(self._peak_pending, self._pending())
            self._peak_bytes = max(self._peak_bytes, self._bytes)
            self._watcher.wake()

    def _wait_for_room(self, send: PendingSend) -> None:
        self._pressure_waits += 1
        since = time.monotonic()
        # In line, or a large message would starve behind small ones of other threads.
        self._line.append(send)
        try:
            # No time-out of its own: the watcher ends a send that makes no progress, and wakes us.
            while self._line[0] is not send or self._is_full(send.nbytes):
                self._changed.wait()
                self._raise_if_unusable()
        finally:
            self._line.remove(send)
            self._pressure_s += time.monotonic() - since
            self._changed.notify_all()

    def _pending(self) -> int:
        return len(self._queue) + len(self._posting)

    def _is_full(self, nbytes: int) -> bool:
        pending = self._pending()
        if pending == 0:
            return False
        too_many = pending >= self._config.max_pending_sends
        return too_many or self._bytes + nbytes > self._config.max_retained_bytes

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise ChannelClosedError(f"group {self.name} was destroyed; nothing can be sent on it any more") from (
                self._failure
            )
        if self._failure is not None:
            raise self._failure.anew() from self._failure

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, send: PendingSend) -> None:
        """Block until the peer has taken ``send`` and everything before it.

        Raises:
            SendError: If it failed, or nothing moved for ``send_deadline_s``.
        """
        with self._changed:
            while not send.done and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                self._raise_if_unusable()

    def drain(self, deadline_s: float | None = None) -> None:
        """Block until nothing is in flight.

        Args:
            deadline_s: Seconds to wait at most, by default ``drain_deadline_s``.

        Raises:
            DrainTimeoutError: If something still is in flight then. It stays in flight and nothing is freed.
        """
        deadline_s = self._config.drain_deadline_s if deadline_s is None else deadline_s
        with self._changed:
            if self._changed.wait_for(lambda: not self._pending(), min(deadline_s, threading.TIMEOUT_MAX)):
                return
            count, now, oldest = self._pending(), time.monotonic(), self._oldest()
        assert oldest is not None
        raise DrainTimeoutError(
            f"group {self.name}: {count} sends still in flight after {deadline_s:g} s, the oldest: "
            f"{oldest.describe(now)}. Look at what that rank is doing; pp_plugin.drain_deadline_s is the time given",
            peer=oldest.peer,
            keys=oldest.keys,
            age_s=now - oldest.posted_at,
        )

    def _oldest(self) -> PendingSend | None:
        """The send that is waited for: the head of the queue, or one whose posting does not come back."""
        heads = [queue[0] for queue in (self._queue, self._posting) if queue]
        return min(heads, key=lambda send: send.posted_at, default=None)

    def close(self, deadline_s: float | None = None) -> DrainTimeoutError | None:
        """Take no more sends, drain, and end both threads. Safe to call again.

        What is not taken by the deadline is ended by aborting the group; its buffers are freed only when the
        transport has let go of them.

        Returns:
            The error of the drain, if its deadline passed, for the caller to log.
        """
        with self._changed:
            if self._closed and self._aborted:
                return self._close_result  # there is nothing more to wait for
            self._closed = True
            self._changed.notify_all()
        late: DrainTimeoutError | None = None
        try:
            self.drain(deadline_s)
        except DrainTimeoutError as exc:
            late = self._close_result = exc
            self._fail(exc)  # wakes who waits for one of them, and is the reason, not the abort that follows
            self._end_group()
        self._watcher.stop(_ABORT_GRACE_S)
        drainer = self._drainer
        if drainer is not None:
            drainer.join(_ABORT_GRACE_S)
        return late

    @property
    def failure(self) -> SendError | None:
        """The error that every later call raises, if a send has failed."""
        return self._failure

    def stats(self) -> LedgerStats:
        """A snapshot of the counters."""
        with self._changed:
            oldest = self._oldest()
            return LedgerStats(
                sends=self._sends,
                pending=self._pending(),
                retained_bytes=self._bytes,
                peak_pending=self._peak_pending,
                peak_retained_bytes=self._peak_bytes,
                back_pressure_waits=self._pressure_waits,
                back_pressure_s=self._pressure_s,
                oldest_s=time.monotonic() - oldest.posted_at if oldest else 0.0,
            )

    # -- draining (its own thread) ---------------------------------------------------------------------

    def _start_threads(self) -> None:
        if self._drainer is None:
            self._watcher.start()
            drainer = threading.Thread(target=self._drain_loop, name=f"pp-send-drain[{self.name}]", daemon=True)
            drainer.start()
            self._drainer = drainer

    def _drain_loop(self) -> None:
        self._thread_started()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or (self._closed and not self._posting))
                if not self._queue:
                    return
                send = self._queue[0]
            if self._complete(send) and send.recycle is not None:
                self._recycle(send.recycle)
            with self._changed:
                self._queue.popleft()
                self._bytes -= send.nbytes
                self._last_progress = time.monotonic()
                send.done = True
                send.works.clear()
                send.retained.clear()
                send.recycle = None
                self._changed.notify_all()
            del send  # or this thread would keep the last message's record while it is idle

    def _complete(self, send: PendingSend) -> bool:
        """Wait for every work of a message, each exactly once; whether all went well."""
        well = True
        for rule, work in send.works:
            # Each step for itself: a work that cannot be asked must be waited for nevertheless.
            for step in (self._poll, self._wait) if rule is Completion.POLL else (self._wait,):
                try:
                    step(work)
                except Exception as exc:  # noqa: BLE001 - transports raise what they like; kept, raised to the caller
                    # Without its traceback, whose frames hold the work and so the tensors.
                    self._on_error(send, exc.with_traceback(None))
                    well = False
            with self._changed:
                self._last_progress = time.monotonic()
        return well

    @staticmethod
    def _poll(work: Work) -> None:
        pause = _POLL_FIRST_S
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MOST_S)

    @staticmethod
    def _wait(work: Work) -> None:
        if work.wait() is False:
            raise RuntimeError("the transport says that it did not complete")

    @staticmethod
    def _recycle(recycle: Callable[[], None]) -> None:
        try:
            recycle()
        except Exception:  # a pool's fault must not end the draining; the buffers are just dropped
            logger.exception("private copies could not be recycled")

    def _on_error(self, send: PendingSend, exc: Exception) -> None:
        now = time.monotonic()
        self._fail(
            SendFailedError(
                f"group {self.name}: {send.describe(now)}, failed: {exc}. "
                f"Rank {send.peer} has most likely ended: look at its log",
                peer=send.peer,
                keys=send.keys,
                age_s=now - send.posted_at,
            ),
            exc,
        )

    def _fail(self, error: SendError, cause: BaseException | None = None) -> None:
        """Keep the first error: later ones are its consequences."""
        with self._changed:
            if self._failure is None:
                error.__cause__ = cause
                self._failure = error
            self._changed.notify_all()

    # -- the clock (the watcher's thread) --------------------------------------------------------------

    def _stuck_send(self) -> Stuck | None:
        """The oldest send; stuck since it was posted or since anything moved, whichever is later."""
        with self._changed:
            oldest, now = self._oldest(), time.monotonic()
            if oldest is None:
                return None
            return Stuck(
                send=oldest,
                what=oldest.describe(now),
                age_s=now - oldest.posted_at,
                stuck_s=now - max(oldest.posted_at, self._last_progress),
                pending=self._pending(),
            )

    def _on_deadline(self, stuck: Stuck) -> bool:
        send: PendingSend = stuck.send
        with self._changed:
            if self._oldest() is not send:
                return False  # taken in this very moment
        self._fail(
            SendDeadlineError(
                f"group {self.name}: {stuck.what}, was not taken and nothing moved for {stuck.stuck_s:.1f} s "
                f"(pp_plugin.send_deadline_s is {self._config.send_deadline_s:g}). Rank {send.peer} hangs or is "
                "gone; the group is closed. Look at that rank's log and restart the engine",
                peer=send.peer,
                keys=send.keys,
                age_s=stuck.age_s,
            )
        )
        self._end_group()
        return True

    def _end_group(self) -> None:
        with self._changed:
            if self._aborted:
                return
            self._aborted = True
        try:
            self._abort()
        except Exception:  # the reason is in the failure; what cannot be aborted must not hide it
            logger.exception("group %s could not be aborted", self.name)
