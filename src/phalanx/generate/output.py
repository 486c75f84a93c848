"""Writes several texts that grow at the same time in order: one is shown as it comes, the others when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class OrderedOutput:
    """Text number i begins with `beginnings[i]`. Pieces may come in any order of texts."""

    def __init__(self, write: Callable[[str], None], beginnings: Sequence[str]):
        self._write, self._beginnings = write, beginnings
        self._held = [""] * len(beginnings)
        self._ended = [False] * len(beginnings)
        self._turn = -1
        self._next()

    def give(self, number: int, piece: str) -> None:
        """Takes the next piece of a text."""
        if number == self._turn:
            self._write(piece)
        else:
            self._held[number] += piece

    def end(self, number: int) -> None:
        """Takes the end of a text."""
        self._ended[number] = True
        while self._turn < len(self._ended) and self._ended[self._turn]:
            self._write("\n")
            self._next()

    def interrupt(self) -> None:
        """Writes what has been held back of texts that have begun."""
        for number in range(max(self._turn, 0), len(self._ended)):
            if number == self._turn or self._held[number]:
                self.end(number)

    def _next(self) -> None:
        self._turn += 1
        if self._turn < len(self._ended):
            self._write(self._beginnings[self._turn] + self._held[self._turn])
