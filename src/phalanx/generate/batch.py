"""The texts of one command: several prompts, several samples of each, with or without an assistant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, PhalanxError
from phalanx.generate.engine import Engine, GenerationStats
from phalanx.generate.load import LoadedRun, load_run
from phalanx.generate.output import OrderedOutput
from phalanx.generate.request import GenerationRequest
from phalanx.generate.sampling import Sampling
from phalanx.generate.speculate import expected_speedup, require_match
from phalanx.generate.text import TextStream

WARM_UP_TOKENS = 8
"""Tokens generated before a comparison: the first passes also load code and touch memory."""


class TextBatch:
    """Texts of `prompts`, `samples` each. Raises JobError with every prompt that the tokenizer cannot encode."""

    def __init__(
        self,
        loaded: LoadedRun,
        prompts: Sequence[str],
        samples: int,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
    ):
        self._loaded, self._stop, self._samples = loaded, stop, samples
        self._ends = () if ignore_end else loaded.tokenizer.end_ids
        self._prompts: list[list[int]] = []
        problems = []
        for number, prompt in enumerate(prompts, 1):
            try:
                self._prompts.append(loaded.encode(prompt))
            except PhalanxError as error:
                problems.append(f"prompt {number}: {error}" if len(prompts) > 1 else str(error))
        if problems:
            raise JobError(problems)
        self._texts = [(prompt, sample) for prompt in self._prompts for sample in range(samples)]
        self._streams: list[TextStream] = []
        self._requests: list[GenerationRequest] = []

    def __len__(self) -> int:
        return len(self._texts)

    def engine(self, assistant: Path | None, device: str, draft_tokens: int, max_batch: int) -> Engine:
        """Returns an engine over the model and, if there is one, the assistant from its run. Raises JobError if the
        assistant does not suit the model, and the errors of `load_run`."""
        decoder = self._loaded.decoder
        if assistant is None:
            return Engine(decoder, max_batch=max_batch)
        small = assistant_of(self._loaded, assistant, device, draft_tokens)
        return Engine(decoder, small.decoder, draft_tokens=draft_tokens, max_batch=max_batch)

    def beginnings(self) -> list[str]:
        """Returns what each text begins with: the prompt, and with several texts a line with its numbers before it."""
        found = []
        for number, (prompt, sample) in enumerate(self._texts):
            title = f"--- prompt {number // self._samples + 1}" + (
                f", sample {sample + 1}" if self._samples > 1 else ""
            )
            found.append((f"{title}\n" if len(self) > 1 else "") + self._loaded.tokenizer.decode(prompt))
        return found

    def run(self, engine: Engine, output: OrderedOutput | None, assisted: bool = True, **options: Any) -> None:
        """Generates all texts, with the `options` of Sampling, and shows them in `output` as they grow."""
        self._streams = [TextStream(self._loaded.tokenizer, prompt, self._stop) for prompt, _ in self._texts]
        self._requests = [self._request(number, output, assisted, options) for number in range(len(self))]
        engine.run(self._requests)

    def measure_plain(self, engine: Engine, **options: Any) -> GenerationStats:
        """Generates all texts without the assistant, and returns the speed. Resets the engine's own numbers."""
        for assisted in (True, False):
            warm_up = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
            self.run(engine, None, assisted, **warm_up)
        engine.stats = GenerationStats()
        self.run(engine, None, assisted=False, **options)
        plain, engine.stats = engine.stats, GenerationStats()
        return plain

    def results(self) -> list[dict[str, Any]]:
        """Returns prompt, text, number of new tokens and reason of the end of each text."""
        decode = self._loaded.tokenizer.decode
        rows = zip(self._texts, self._requests, self._streams, strict=True)
        return [
            {
                "prompt": decode(prompt),
                "sample": sample,
                "text": decode(prompt) + stream.text,
                "tokens": len(request.new_tokens),
                "finish": request.finish or "interrupted",
            }
            for (prompt, sample), request, stream in rows
        ]

    def _request(
        self, number: int, output: OrderedOutput | None, assisted: bool, options: dict[str, Any]
    ) -> GenerationRequest:
        stream, (prompt, sample) = self._streams[number], self._texts[number]

        def on_token(token: int) -> bool:
            piece = stream.push(token)
            if output and piece:
                output.give(number, piece)
            return stream.stopped

        def on_end() -> None:
            piece = stream.finish()
            if output:
                output.give(number, piece)
                output.end(number)

        sampling = Sampling(**options, sample=sample)
        return GenerationRequest(prompt, sampling, ends=self._ends, on_token=on_token, on_end=on_end, assisted=assisted)


def assistant_of(loaded: LoadedRun, run: Path, device: str, draft_tokens: int) -> LoadedRun:
    """Returns the assistant from its run. Raises JobError if it does not suit the model, and the errors of
    `load_run`."""
    assistant = load_run(run, device=device)
    same = assistant.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    require_match(loaded.decoder.config, loaded.decoder.vocab, assistant.decoder.vocab, same, draft_tokens)
    return assistant


def comparison(plain: GenerationStats, assisted: GenerationStats) -> dict[str, float]:
    """Returns the speed with an assistant beside the one without, and what the formula says for the same acceptance:
    the texts must have been generated by one engine, one at a time for the formula to hold."""
    plain_tps, assisted_tps = (stats.summary()["new_tps"] for stats in (plain, assisted))
    numbers = {"plain_tps": plain_tps, "assisted_tps": assisted_tps}
    if plain_tps and assisted.passes and assisted.draft_steps:
        cost = assisted.draft_s / assisted.draft_steps * plain_tps
        drafts = assisted.proposed / assisted.passes
        numbers["speedup"] = round(assisted_tps / plain_tps, 3)
        numbers["draft_cost"] = round(cost, 3)
        numbers["expected_speedup"] = round(expected_speedup(assisted.alpha, round(drafts), cost), 3)
    return numbers


def line(numbers: dict[str, float]) -> str:
    """Returns numbers as a log line."""
    return "  ".join(f"{name}: {value:,}" for name, value in numbers.items())
