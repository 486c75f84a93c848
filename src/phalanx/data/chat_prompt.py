"""The prompts of a model that was trained on conversations: messages in, tokens up to its answer out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from phalanx.data.row_fields import ANSWERS
from phalanx.data.template import ChatTemplate, Renderer, own_template
from phalanx.data.tokenizer import Tokenizer

_QUESTION, _ANSWER = "Question?", "Answer."


class ChatPrompts:
    """Makes prompts of messages, with a chat template. Several threads may call it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self.template, self.tokenizer = template, tokenizer
        self._renderer, self._lock = Renderer(template), Lock()
        self._end: str | None = None

    @classmethod
    def of_run(cls, folder: Path, tokenizer: Tokenizer) -> ChatPrompts | None:
        """Returns the prompts of a run's template; None if it has none. Raises DataError if it cannot be read."""
        template = own_template(folder)
        return template and cls(template, tokenizer)

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to where the model's answer begins. Raises ValueError, saying why, if
        the template refuses it."""
        return self.encode(self.text(messages))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a conversation up to where the model's answer begins. Raises as a call does."""
        with self._lock:
            return self._renderer.prompt(messages)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of such a text, in which special tokens are themselves. Raises DataError as the
        tokenizer."""
        [(ids, _)] = self.tokenizer.encode_marked([[(text, False)]])
        return ids.tolist()

    @property
    def end(self) -> str:
        """The text that ends an answer, "<|im_end|>" for example; empty if the template writes none."""
        messages = [{"role": "user", "content": _QUESTION}, {"role": ANSWERS, "content": _ANSWER}]
        with self._lock:
            if self._end is None:
                answers = [text for text, answer in self._renderer.parts(messages) if answer]
                self._end = answers[-1].partition(_ANSWER)[2] if answers else ""
            return self._end
