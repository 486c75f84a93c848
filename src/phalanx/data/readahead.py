"""Reads an iterator ahead in a background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LAST_ITEM_S = 2.0  # a reader that slow storage blocks for longer is left behind: it is a daemon


@dataclass(frozen=True)
class _End:
    """The last entry of the queue: the items ended, were closed, or raised."""

    error: BaseException | None = None


class ReadAhead(Generic[T]):
    """An iterator over `items` that prefetches at most `depth` of them.

    An exception raised by `items` is raised here, in its turn. `close`, or dropping the last reference, ends the thread
    as soon as the item in progress is done.
    """

    def __init__(self, items: Iterator[T], depth: int):
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._seen: list[T | _End] = []  # the next item, once `wait` has found it
        self._free = threading.Semaphore(depth)
        self._stop = threading.Event()
        # The thread holds no reference to self, or self would live as long as the thread.
        arguments = (items, self._ready, self._free, self._stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name="read-ahead", daemon=True)
        self._signal = weakref.finalize(self, _signal, self._free, self._stop)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        item = self._seen.pop() if self._seen else self._ready.get()
        if isinstance(item, _End):
            self.close()
            raise item.error or StopIteration
        self._free.release()
        return item

    def wait(self, seconds: float) -> bool:
        """Waits until the next item can be taken without waiting, at most `seconds`; returns whether it can."""
        if not self._seen and not self._stop.is_set():
            try:
                self._seen.append(self._ready.get(timeout=seconds))
            except queue.Empty:
                return False
        return True

    def close(self) -> None:
        """Stops reading, waits for the thread and drops prefetched items; the next item raises StopIteration.

        A thread that stays in one item for longer than two seconds, on slow storage, ends after it."""
        self._signal()
        self._thread.join(_LAST_ITEM_S)


def _fill(
    items: Iterator[T], ready: queue.SimpleQueue[T | _End], free: threading.Semaphore, stop: threading.Event
) -> None:
    try:
        free.acquire()
        while not stop.is_set():
            ready.put(next(items))
            free.acquire()
    except StopIteration:
        pass
    except BaseException as error:
        ready.put(_End(error))
    ready.put(_End())


def _signal(free: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    free.release()
