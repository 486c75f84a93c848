"""Generates many texts at once: requests join and leave the batch between steps (Orca, Yu et al. 2022, section 3).

Each text is in one of three places. *Assisted* texts grow by what an assistant proposes and the model accepts; *plain*
ones by a token per step; *sliding* ones are longer than the model's context, which is computed anew for each token,
because every token has a new position. Texts move from place to place as they grow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import JobError
from phalanx.generate.decoder import Decoder
from phalanx.generate.sampling import Sampling, prompt_problems
from phalanx.generate.text import TextStream
from phalanx.model.seeding import derive_seed

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

    def choose(self, logits: Tensor) -> None:
        """Takes the next token, from `logits` (vocab,)."""
        self.take(next_token(logits, self.sampling, self.generator))

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


def generator_of(sampling: Sampling, role: str = "generate") -> torch.Generator:
    """Returns the random numbers of one text. They are drawn on the CPU, so that the text does not depend on the device
    that computes the logits."""
    key = (sampling.sample,) if sampling.sample else ()
    return torch.Generator().manual_seed(derive_seed(sampling.seed, role, *key))


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probabilities with which the next token is drawn, (..., vocab) in float64, from logits (..., vocab).
    At temperature 0 the likeliest token has all of it."""
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        weakest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, order, kept)
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """Returns a token drawn with `probabilities` (vocab,)."""
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Returns the next token from `logits` (vocab,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, sampling), generator)


def acceptance(model: Tensor, assistant: Tensor) -> Tensor:
    """Returns the probability with which each token is accepted once it is proposed, min(1, p / q), (..., vocab), from
    the probabilities p of the model and q of the assistant. A token that is never proposed has 1."""
    return torch.where(assistant > 0, model / assistant, 1.0).clamp(max=1)


def residual(model: Tensor, assistant: Tensor) -> Tensor:
    """Returns the probabilities from which a token is drawn in place of a rejected one: max(0, p - q), normalised,
    (..., vocab). Where p is q, nothing is rejected; the result is p then."""
    rest = (model - assistant).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, model)


def accept(model: Tensor, assistant: Tensor, proposed: Sequence[int], generator: torch.Generator) -> list[int]:
    """Returns the next tokens: the proposed ones up to the first that is rejected, and one more, which the model draws.

    `model` (proposed + 1, vocab) are the model's probabilities after none, one, ... all of the `proposed` tokens,
    `assistant` (proposed, vocab) those from which these were drawn."""
    chances = acceptance(model[:-1], assistant)
    for place, token in enumerate(proposed):
        chance = float(chances[place, token])
        if chance < 1 and float(torch.rand((), dtype=torch.float64, generator=generator)) >= chance:
            return [*proposed[:place], draw(residual(model[place], assistant[place]), generator)]
    return [*proposed, draw(model[-1], generator)]


def expected_tokens(alpha: float, drafts: int) -> float:
    """Returns the tokens per pass of the model, where each of `drafts` tokens is accepted with probability `alpha`
    (Leviathan et al. 2023, equation 1)."""
    return drafts + 1.0 if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)


def expected_speedup(alpha: float, drafts: int, cost: float) -> float:
    """Returns how many times faster text becomes, where a step of the assistant takes `cost` times that of the model
    and checking `drafts` + 1 tokens as long as computing one (Leviathan et al. 2023, theorem 3.8)."""
    return expected_tokens(alpha, drafts) / (drafts * cost + 1)


def require_match(model: ModelConfig, vocab: int, assistant_vocab: int, same_tokenizer: bool, drafts: int) -> None:
    """Raises JobError, with everything that is in the way, unless an assistant can propose tokens to a model."""
    problems = []
    if drafts < 1:
        problems.append(f"draft_tokens={drafts}: the assistant must propose at least 1 token")
    if vocab != assistant_vocab:
        problems.append(
            f"the assistant's vocabulary has {assistant_vocab:,} tokens, the model's {vocab:,}: an assistant needs the "
            "model's vocabulary, so train it with the same tokenizer"
        )
    elif not same_tokenizer:
        problems.append(
            f"the tokenizers of model and assistant differ, although both have {vocab:,} tokens: the same number would "
            "stand for another text"
        )
    if model.moe.capacity:
        problems.append(
            f"model.moe.capacity={model.moe.capacity:g} drops tokens by how many come together, so a model that "
            "checks several tokens at once gives another text; nearest legal: no assistant"
        )
    if problems:
        raise JobError(problems)


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


class TextRequest(GenerationRequest):
    """A request whose tokens become text: `give` gets each piece as soon as it is certain, and `on_end` is called after
    the last one, in the thread that runs the engine. It ends at an end-of-text token, unless `ends` are others, and at
    a text of `stop`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        stop: Sequence[str] = (),
        *,
        ends: Sequence[int] | None = None,
        give: Callable[[str], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
        assisted: bool = True,
    ):
        stream = self.stream = TextStream(tokenizer, prompt, stop)

        def push(token: int) -> bool:
            if piece := stream.push(token):
                give(piece)
            return stream.stopped

        def finish() -> None:
            give(stream.finish())
            on_end()

        ends = tokenizer.end_ids if ends is None else ends
        super().__init__(prompt, sampling, ends=ends, on_token=push, on_end=finish, assisted=assisted)


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
            text.choose(logits)
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
            text.choose(row)
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
