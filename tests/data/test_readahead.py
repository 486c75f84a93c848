"""Reading ahead: the same items in the same order, errors in their turn, and no thread left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx.data.loader import ReadAhead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def counting(made: list[int], last: int = 10**9) -> Iterator[int]:
    for number in range(last):
        made.append(number)
        yield number


def test_items_in_order_then_the_end() -> None:
    items = ReadAhead(iter(range(20)), 3)
    assert list(items) == list(range(20))
    assert list(items) == []
    assert not threads()


@pytest.mark.parametrize("depth", [1, 4])
def test_at_most_depth_items_are_ready(depth: int) -> None:
    made: list[int] = []
    items = ReadAhead(counting(made), depth)
    assert soon(lambda: len(made) == depth)
    assert next(items) == 0
    assert soon(lambda: len(made) == depth + 1)
    time.sleep(0.05)
    assert len(made) == depth + 1
    items.close()


def test_an_error_comes_in_its_turn() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    items = ReadAhead(failing(), 5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert not threads()


def test_close_is_prompt_and_may_come_twice() -> None:
    items = ReadAhead(counting([]), 2)
    next(items)
    started = time.monotonic()
    items.close()
    items.close()
    assert time.monotonic() - started < 1
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)


def test_close_wakes_a_waiting_reader() -> None:
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(10)
        yield 1

    items = ReadAhead(slow(), 1)
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.append(list(items)))
    reader.start()
    threading.Timer(0.05, go.set).start()
    items.close()
    reader.join(10)
    assert got in ([[]], [[1]])
    assert not threads()


def test_dropping_the_last_reference_ends_the_thread() -> None:
    items = ReadAhead(counting([]), 2)
    next(items)
    del items
    gc.collect()
    assert soon(lambda: not threads())
