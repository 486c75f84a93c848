"""Turns tokens into text as they come: whole characters only, and nothing beyond a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.data.tokenizer import Tokenizer


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


REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one request's new tokens. A character may consist of several tokens, and a stop string too, so some
    text is held back until it is certain."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._tokens = list(prompt)
        self._first, self._read = 0, len(self._tokens)
        """Tokens from `_first` on are decoded, since a token's text depends on those before it; up to `_read` they have
        been."""
        self._before = tokenizer.decode(self._tokens)
        self.text = ""
        """All text so far, also that which is held back."""
        self._given = 0
        self.stopped = False
        """Whether a stop string has come."""

    def push(self, token: int) -> str:
        """Takes the next token; returns the new text that is certain."""
        self._tokens.append(token)
        found = self._tokenizer.decode(self._tokens[self._first :])
        if found.endswith(REPLACEMENT) and len(self._tokens) - self._read < 8:  # no character has more tokens
            return ""
        self._add(found)
        return self._certain()

    def finish(self) -> str:
        """Returns what has been held back."""
        if self._read < len(self._tokens) and not self.stopped:
            self._add(self._tokenizer.decode(self._tokens[self._first :]))
        piece, self._given = self.text[self._given :], len(self.text)
        return piece

    def _add(self, found: str) -> None:
        """Appends the text of tokens that have not been read, from that of all since `_first`."""
        begin = len(self.text)
        self.text += found[len(self._before) :]
        self._first, self._read = self._read, len(self._tokens)
        self._before = self._tokenizer.decode(self._tokens[self._first :])
        places = [self.text.find(stop, max(0, begin - len(stop) + 1)) for stop in self._stop]
        if any(place >= 0 for place in places):
            self.text = self.text[: min(place for place in places if place >= 0)]
            self.stopped = True

    def _certain(self) -> str:
        """Returns text that has not been given, without an end that may be the beginning of a stop string."""
        end = len(self.text)
        if not self.stopped:
            end -= max((_overlap(self.text, stop) for stop in self._stop), default=0)
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
