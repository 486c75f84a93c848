"""Reads an iterator ahead in a background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


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
        item = self._ready.get()
        if isinstance(item, _End):
            self.close()
            raise item.error or StopIteration
        self._free.release()
        return item

    def close(self) -> None:
        """Stops reading, waits for the thread and drops prefetched items; the next item raises StopIteration."""
        self._signal()
        self._thread.join()


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
