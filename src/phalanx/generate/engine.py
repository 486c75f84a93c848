"""Generates many texts at once: requests join and leave the batch between steps (Orca, Yu et al. 2022, section 3).

Each text is in one of three places. *Assisted* texts grow by what an assistant proposes and the model accepts; *plain*
ones by a token per step; *sliding* ones are longer than the model's context, which is computed anew for each token,
because every token has a new position. Texts move from place to place as they grow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.generate.decoder import Decoder
from phalanx.generate.draws import distribution, draw, next_token
from phalanx.generate.request import Finish, GenerationRequest
from phalanx.generate.sampling import prompt_problems
from phalanx.generate.speculate import accept

ASSISTED, PLAIN, SLIDING = "assisted", "plain", "sliding"


@dataclass
class GenerationStats:
    """Counts and times of an engine's work."""

    prompt_tokens: int = 0
    """Tokens of prompts computed; a prompt with several samples is computed once."""
    prompt_s: float = 0.0
    new_tokens: int = 0
    """Tokens generated, without the first of each text, which comes with the prompt."""
    new_s: float = 0.0
    passes: int = 0
    """Passes of the model over assisted texts, counted per text."""
    proposed: int = 0
    """Tokens proposed by the assistant."""
    accepted: int = 0
    rejected: int = 0
    """Proposed tokens that were replaced by one of the model's own; those after them were not looked at."""
    draft_steps: int = 0
    draft_s: float = 0.0
    """Seconds of the assistant's steps, within `new_s`."""

    @property
    def alpha(self) -> float:
        """The share accepted of the proposed tokens that were looked at (Leviathan et al. 2023, definition 3.1)."""
        return self.accepted / max(1, self.accepted + self.rejected)

    def summary(self) -> dict[str, float]:
        """Returns tokens, tokens per second, and with an assistant the share accepted of all its tokens, `alpha`, and
        the tokens per pass of the model."""
        numbers: dict[str, float] = {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tps": round(self.prompt_tokens / self.prompt_s, 1) if self.prompt_s else 0.0,
            "new_tokens": self.new_tokens,
            "new_tps": round(self.new_tokens / self.new_s, 1) if self.new_s else 0.0,
        }
        if self.passes:
            numbers["acceptance"] = round(self.accepted / self.proposed, 4)
            numbers["alpha"] = round(self.alpha, 4)
            numbers["tokens_per_pass"] = round((self.accepted + self.passes) / self.passes, 3)
        return numbers


class Engine:
    """Runs requests in batches of at most `max_batch` texts. With an `assistant`, texts grow by speculative decoding of
    `draft_tokens` at a time. All methods belong to one thread, except `submit`."""

    def __init__(
        self, decoder: Decoder, assistant: Decoder | None = None, *, draft_tokens: int = 4, max_batch: int = 8
    ):
        self.decoder, self.assistant = decoder, assistant
        self.draft_tokens, self.max_batch = draft_tokens, max_batch
        self.stats = GenerationStats()
        self._waiting: deque[GenerationRequest] = deque()
        self._texts: dict[str, list[GenerationRequest]] = {ASSISTED: [], PLAIN: [], SLIDING: []}

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.decoder.config

    def submit(self, request: GenerationRequest) -> None:
        """Puts a request in the queue; from any thread. Raises JobError if its prompt or its options make no sense."""
        problems = [*prompt_problems(request.tokens, self.decoder.vocab), *request.sampling.problems()]
        if problems:
            raise JobError(problems)
        self._waiting.append(request)

    def run(self, requests: Iterable[GenerationRequest]) -> None:
        """Runs requests to their end. Raises JobError as `submit`, before any begins."""
        for request in requests:
            self.submit(request)
        while self.step():
            pass

    def step(self) -> bool:
        """Lets waiting requests join, and every text grow by at least a token. Returns whether there is more to do."""
        for place in self._texts:
            for request in self._texts[place]:
                if request.cancelled:
                    request.end("cancelled")
            self._settle(place)
        start = time.perf_counter()
        self._admit()
        begun = time.perf_counter()
        self.stats.prompt_s += begun - start
        if self._texts[ASSISTED]:
            self._grow_assisted()
        if self._texts[PLAIN]:
            texts = self._texts[PLAIN]
            self._grow(PLAIN, self.decoder.step(PLAIN, [text.tokens[-1:] for text in texts])[:, 0])
        if texts := self._texts[SLIDING]:
            self._grow(SLIDING, self.decoder.window([text.tokens[-self.model.seq_len :] for text in texts]))
        self.stats.new_s += time.perf_counter() - begun
        return bool(self._waiting or self._running)

    def abort(self, finish: Finish = "cancelled") -> None:
        """Ends all requests, running and waiting, whatever state the decoder is in."""
        while self._waiting:
            self._waiting.popleft().end(finish)
        for texts in self._texts.values():
            for request in texts:
                request.end(finish)

    @property
    def _running(self) -> int:
        return sum(map(len, self._texts.values()))

    def _admit(self) -> None:
        """Computes the prompts of waiting requests while there is room. Samples of the same prompt share its pass."""
        while self._waiting and self._running < self.max_batch:
            first = self._waiting[0]
            same: list[GenerationRequest] = []
            while self._waiting and len(same) < self.max_batch - self._running:
                request = self._waiting[0]
                if request.tokens != first.tokens or request.assisted != first.assisted:
                    break
                self._waiting.popleft()
                if request.cancelled or not request.remaining:
                    request.end("cancelled" if request.cancelled else "length")
                else:
                    same.append(request)
            if same:
                self._begin(same)

    def _begin(self, texts: list[GenerationRequest]) -> None:
        """Computes a prompt and chooses the first token of each of its texts."""
        prompt = texts[0].tokens
        place = self._place(texts[0], len(prompt) + 1)
        self.stats.prompt_tokens += len(prompt)
        if place == SLIDING:
            logits = self.decoder.window([prompt[-self.model.seq_len :]])[0]
        else:
            logits = self.decoder.prefill(place, prompt, len(texts), last=True)
        if place == ASSISTED and self.assistant:
            # It lacks the last two tokens at the start of each round: see _grow_assisted.
            self.assistant.prefill(ASSISTED, prompt, len(texts), last=False)
        for text in texts:
            text.take(next_token(logits, text.sampling, text.generator))
        self._texts[place] += texts
        self._settle(place)

    def _place(self, text: GenerationRequest, length: int) -> str:
        """Returns where a text of `length` tokens, the last of them not computed yet, grows next."""
        if length > self.model.seq_len:
            return SLIDING
        return ASSISTED if text.assisted and self._draft_room(length) > 0 else PLAIN

    def _draft_room(self, length: int) -> int:
        """Returns how many tokens may be proposed after `length`, for the contexts of both models."""
        if self.assistant is None:
            return 0
        return min(self.model.seq_len - length, self.assistant.config.seq_len - length + 1)

    def _grow(self, place: str, logits: Tensor) -> None:
        """Appends a token to each text of a place, from logits (texts, vocab)."""
        for text, row in zip(self._texts[place], logits, strict=True):
            text.take(next_token(row, text.sampling, text.generator))
        self.stats.new_tokens += len(logits)
        self._settle(place)

    def _grow_assisted(self) -> None:
        """Lets the assistant propose tokens, and the model take or replace them.

        Between rounds the model's cache lacks a text's last token, and the assistant's the last two: one token more
        than necessary after a rejection, and exactly what it has not seen when all were accepted. So all texts take the
        same number of tokens in each pass."""
        texts, assistant = self._texts[ASSISTED], self.assistant
        assert assistant is not None, "no text is assisted without one"
        room = min(self._draft_room(len(text.tokens)) for text in texts)
        drafts = max(1, min(self.draft_tokens, room, max(text.remaining for text in texts) - 1))
        proposed: list[list[int]] = [[] for _ in texts]
        chances: list[list[Tensor]] = [[] for _ in texts]
        feed = [text.tokens[-2:] for text in texts]
        begun = time.perf_counter()
        for _ in range(drafts):
            logits = assistant.step(ASSISTED, feed)[:, -1]
            for row, text in enumerate(texts):
                probabilities = distribution(logits[row], text.sampling)
                greedy = text.sampling.temperature == 0
                token = int(probabilities.argmax()) if greedy else draw(probabilities, text.draft_generator)
                proposed[row].append(token)
                chances[row].append(probabilities)
            feed = [tokens[-1:] for tokens in proposed]
        self.stats.draft_steps += drafts
        self.stats.draft_s += time.perf_counter() - begun
        checked = [[text.tokens[-1], *tokens] for text, tokens in zip(texts, proposed, strict=True)]
        logits = self.decoder.step(ASSISTED, checked)
        dropped = []
        for row, text in enumerate(texts):
            probabilities = distribution(logits[row], text.sampling)
            new = accept(probabilities, torch.stack(chances[row]), proposed[row], text.generator)
            dropped.append(drafts - len(new) + 1)
            self._take(text, new, drafts)
        self.decoder.rewind(ASSISTED, dropped)
        assistant.rewind(ASSISTED, dropped)
        self._settle(ASSISTED)

    def _take(self, text: GenerationRequest, new: list[int], drafts: int) -> None:
        """Appends the tokens of a round to a text, up to its end."""
        self.stats.passes += 1
        self.stats.proposed += drafts
        self.stats.accepted += len(new) - 1
        self.stats.rejected += len(new) <= drafts
        for token in new:
            if not text.finish:
                text.take(token)
                self.stats.new_tokens += 1

    def _settle(self, place: str) -> None:
        """Removes the texts of a place that have ended, and moves those that have outgrown it."""
        texts = self._texts[place]
        stays = []
        for row, text in enumerate(texts):
            if text.finish:
                continue
            now = self._place(text, len(text.tokens))
            if now == place:
                stays.append(row)
                continue
            if now == PLAIN:
                self.decoder.move(place, row, PLAIN)
            self._texts[now].append(text)
        if len(stays) == len(texts):
            return
        self._texts[place] = [texts[row] for row in stays]
        if place != SLIDING:
            self.decoder.keep(place, stays)
        if place == ASSISTED and self.assistant:
            self.assistant.keep(ASSISTED, stays)
