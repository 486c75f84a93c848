"""A text to be generated, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from phalanx.generate.draws import generator_of
from phalanx.generate.sampling import Sampling

Finish = Literal["", "stop", "length", "cancelled", "failed"]
"""Why a text ended: an end-of-text token or a stop string; max_new_tokens; its owner; an error. Empty until then."""


class GenerationRequest:
    """One text. `on_token` gets each new token as soon as it is chosen, in the thread that runs the engine, and returns
    whether the text ends with it; `on_end` is called once, after the last token. A token in `ends` ends the text and is
    not part of it. `cancel` may be called from any thread."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        ends: Sequence[int] = (),
        on_token: Callable[[int], bool | None] | None = None,
        on_end: Callable[[], None] | None = None,
        assisted: bool = True,
    ):
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        """The prompt and the new tokens."""
        self.sampling, self.ends, self.assisted = sampling, frozenset(ends), assisted
        self.finish: Finish = ""
        self.generator, self.draft_generator = generator_of(sampling), generator_of(sampling, "draft")
        self._on_token, self._on_end = on_token, on_end
        self._cancelled = False

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def cancelled(self) -> bool:
        """Whether its owner has given it up."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends the text before the engine's next step."""
        self._cancelled = True

    def take(self, token: int) -> None:
        """Appends the next token, and ends the text if it was the last."""
        if token in self.ends:
            self.end("stop")
            return
        self.tokens.append(token)
        stopped = self._on_token is not None and self._on_token(token)
        if stopped or not self.remaining:
            self.end("stop" if stopped else "length")

    def end(self, finish: Finish) -> None:
        """Ends the text, if it has not ended."""
        if self.finish:
            return
        self.finish = finish
        if self._on_end is not None:
            self._on_end()
