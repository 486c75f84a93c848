"""lm-eval's harness: a thin adapter between its requests and a run (lm_eval.api.model.LM, version 0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.config.job import IGNORE
from phalanx.data.template import ChatPrompts
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import JobError
from phalanx.evaluate.text import ContextWindow, batches, windows
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import Engine, TextRequest
from phalanx.generate.sampling import Sampling
from phalanx.nearest import did_you_mean

Batched = tuple[np.ndarray, Sequence[ContextWindow]]


@dataclass(frozen=True)
class Likelihood:
    """The log-likelihood of some tokens, in nats."""

    value: float
    greedy: bool
    """Whether each of them is the likeliest one."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    stops: Sequence[str]
    """Texts that end the answer, and are no part of it."""
    max_new_tokens: int
    """Tokens at most."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""


@dataclass(frozen=True)
class RequestScorer:
    """Answers requests with a model that this process holds whole, `batch_size` windows or texts at a time."""

    decoder: Decoder
    tokenizer: Tokenizer
    batch_size: int
    chat: ChatPrompts | None = None
    """The chat template by which contexts are written; None if they are plain text."""

    @property
    def context(self) -> int:
        """The longest input, in tokens."""
        return self.decoder.config.seq_len

    @property
    def prefix(self) -> Sequence[int]:
        """The tokens before a text that has nothing before it: those with which the model's texts begin, or the end of
        a document, or token 0."""
        return self.tokenizer.begin_ids or self.tokenizer.separator[-1:] or (0,)

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Returns the likelihood of each continuation after its context: pairs of texts. A context that is too long
        loses its beginning. The text is encoded whole, and the continuation is what follows the tokens of the context,
        whose spaces at its end belong to the continuation, as in lm-eval's own models."""
        texts = []
        for before, after in pairs:
            stripped = before.rstrip()
            whole, own = self._encoded(before + after), len(self._encoded(stripped)) if stripped else 0
            first = self.prefix if own == 0 else self._begin
            tokens = np.concatenate((np.array(first, dtype=np.int64), whole))
            scored = len(whole) - own
            tokens = tokens[-(self.context + 1) :] if scored <= self.context else tokens
            texts.append((tokens, list(_last(len(tokens), self.context, scored))))
        return self._scored(texts)

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text, from the prefix token on, in windows that do not overlap."""
        found = []
        for text in texts:
            tokens = np.concatenate((self.prefix, self._encoded(text)))
            found.append((tokens, list(windows(len(tokens), self.context, self.context))))
        return [each.value for each in self._scored(found)]

    def continuations(self, prompts: Sequence[Prompt]) -> list[str]:
        """Returns the text that follows each prompt, up to the first of its stops, or an end-of-text token."""
        ids = [[*self._begin, *self._encoded(each.text).tolist()] if each.text else [*self.prefix] for each in prompts]
        ends = [self.chat.end] if self.chat and self.chat.end else []
        requests = [
            TextRequest(
                self.tokenizer,
                own,
                Sampling(max_new_tokens=prompt.max_new_tokens, temperature=prompt.temperature),
                [*prompt.stops, *ends],
            )
            for own, prompt in zip(ids, prompts, strict=True)
        ]
        Engine(self.decoder, max_batch=self.batch_size).run(requests)
        return [request.stream.text for request in requests]

    @property
    def _begin(self) -> Sequence[int]:
        """The tokens before every text; a chat template writes them itself."""
        return () if self.chat else self.tokenizer.begin_ids

    def _encoded(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text) if self.chat is None else np.array(self.chat.encode(text), dtype=np.int64)

    def _scored(self, texts: Sequence[Batched]) -> list[Likelihood]:
        sums, greedy = [0.0] * len(texts), [True] * len(texts)
        rows = [(number, tokens, window) for number, (tokens, found) in enumerate(texts) for window in found]
        for first in range(0, len(rows), self.batch_size):
            group = rows[first : first + self.batch_size]
            for number, values, best in zip([row[0] for row in group], *self._forward(group), strict=True):
                sums[number] += values
                greedy[number] &= best
        return [Likelihood(*pair) for pair in zip(sums, greedy, strict=True)]

    @torch.inference_mode()
    def _forward(self, group: Sequence[tuple[int, np.ndarray, ContextWindow]]) -> tuple[list[float], list[bool]]:
        """Returns the likelihood of each row's scored tokens, and whether all of them are the likeliest."""
        width = max(window.length for _, _, window in group)
        made = [next(batches(tokens, [w], context=width, micro_batch=1)) for _, tokens, w in group]
        inputs, targets = (
            torch.from_numpy(np.concatenate(parts)).to(self.decoder.device)
            for parts in ([m.tokens for m in made], [m.targets for m in made])
        )
        logits = self.decoder.model(inputs).double()
        counts = targets != IGNORE
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        best = logits.argmax(-1) == targets
        return (chosen * counts).sum(-1).tolist(), (best | ~counts).all(-1).tolist()


def _last(tokens: int, context: int, scored: int) -> Iterator[ContextWindow]:
    """Yields windows that score the last `scored` predictions of a text, the last window first: a continuation that is
    longer than the context is cut into windows that do not overlap."""
    end = tokens - 1
    while scored > 0:
        own = min(scored, context)
        start = max(0, end - context)
        yield ContextWindow(start, end - start, own)
        scored -= own
        end -= own


BOOTSTRAPS = 100
"""Resamplings for the errors of metrics that have no formula for them."""
MOST_NEW_TOKENS = 256
"""Tokens of a generated answer, unless the task says how many."""


def require_harness() -> None:
    """Raises JobError, with what to install, if lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise JobError('--tasks needs lm-eval, not installed here: pip install "phalanx[lm-eval]"')


def adapter(scorer: RequestScorer) -> Any:
    """Returns a model of lm-eval."""
    base: Any = import_module("lm_eval.api.model").LM

    class PhalanxLM(base):
        """Answers lm-eval's three kinds of requests; a request's `args` hold its texts."""

        def __init__(self) -> None:
            super().__init__()
            self.scorer = scorer

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = self.scorer.likelihoods([request.args for request in requests])
            return [(each.value, each.greedy) for each in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return self.scorer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return self.scorer.continuations([_prompt(*request.args) for request in requests])

        @property
        def tokenizer_name(self) -> str:
            return f"phalanx-{scorer.tokenizer.fingerprint}"

        def chat_template(self, chat_template: bool | str = False) -> str:
            return scorer.chat.template.source if scorer.chat else ""

        def apply_chat_template(
            self, chat_history: Sequence[dict[str, Any]], add_generation_prompt: bool = True
        ) -> str:
            assert scorer.chat is not None, "run_tasks asks for templates only with --chat"
            if not add_generation_prompt:
                raise JobError("--chat: a task with a gen_prefix begins answers itself, which templates here cannot")
            try:
                return scorer.chat.text(chat_history)
            except ValueError as error:
                raise JobError(f"the chat template: {error}") from error

    return PhalanxLM()


def _prompt(text: str, options: dict[str, Any]) -> Prompt:
    """Returns a prompt with a task's generation_kwargs."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return Prompt(text, stops, int(options.get("max_gen_toks") or MOST_NEW_TOKENS), temperature)


def run_tasks(
    scorer: RequestScorer,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each task by name. Raises JobError if lm-eval knows none of these names."""
    harness = import_module("lm_eval")
    manager = import_module("lm_eval.tasks").TaskManager(include_path=str(include_path) if include_path else None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        own = "(your own: --include-path FOLDER with its YAML file)"
        raise JobError([f"lm-eval has no task {task}{did_you_mean(task, manager.all_tasks)} {own}" for task in unknown])
    found = harness.simple_evaluate(
        model=adapter(scorer),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=scorer.chat is not None,
        bootstrap_iters=BOOTSTRAPS,
    )
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns a task's metrics, without names, and without errors that are not available."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "sample_len"}
