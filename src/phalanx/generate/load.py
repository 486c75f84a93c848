"""Loads a model and its tokenizer from a run's checkpoint for generation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import field, read_json
from phalanx.check.start import KEPT
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import Box, Manifest, job_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.comm.agree import on_rank_zero
from phalanx.data.template import ChatPrompts, own_template
from phalanx.data.tokenizer import FILE, LARGEST_VOCABULARY, Tokenizer
from phalanx.errors import CheckpointError, JobError, NotFoundError, PhalanxError
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import (
    Engine,
    GenerationRequest,
    GenerationStats,
    TextRequest,
    expected_speedup,
    require_match,
)
from phalanx.generate.sampling import Sampling
from phalanx.generate.text import OrderedOutput
from phalanx.model.layers import allocate
from phalanx.model.transformer import Transformer
from phalanx.parallel.precision import DTYPES
from phalanx.partition.tensor_slices import slice_of
from phalanx.train.device import choose
from phalanx.train.run_directory import RunDirectory


@dataclass(frozen=True)
class LoadedRun:
    """The model of a run, ready to compute, and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer

    chat: ChatPrompts | None = None
    """Turns messages into prompts; None if prompts are plain text."""

    def encode(self, prompt: str) -> list[int]:
        """Returns a prompt's tokens. Raises JobError if it is empty, or if the chat template refuses it."""
        try:
            message = {"role": "user", "content": prompt}
            ids = self.tokenizer.prompt(prompt) if self.chat is None else self.chat([message])
        except ValueError as error:
            raise JobError(f"the chat template: {error}") from error
        if not (prompt and ids):
            raise JobError("the prompt is empty; give at least one character")
        return ids

    def text(self, prompt: str, **options: Any) -> str:
        """Returns the prompt followed by generated text; `options` are those of `sampling.Sampling`. Raises JobError on
        an empty prompt and invalid options."""
        request = GenerationRequest(self.encode(prompt), Sampling(**options), ends=self.tokenizer.end_ids)
        Engine(self.decoder).run([request])
        return self.tokenizer.shown(request.tokens)


def load_run(path: Path, step: int = 0, device: str = "auto") -> LoadedRun:
    """Returns the model of a run from its checkpoint of `step` (0: the newest whole one).

    Raises CheckpointError if there is no run, no such checkpoint, or a damaged one.
    """
    manifest = find(path, step)
    model = empty_model(manifest)
    target = choose(device, 0)
    fill(model, manifest, target)
    return LoadedRun(Decoder.whole(model), tokenizer_of(path, manifest))


def tokenizer_of(run: Path, manifest: Manifest) -> Tokenizer:
    """Returns the tokenizer of a run's checkpoint. Of an imported model, prompts begin as its tokenizer begins texts
    (`<s>`), and texts also end with the tokens that its settings name (eos_token_id); after training here the former
    only if the chat template of that writes the same. Raises NotFoundError if there is no tokenizer, CheckpointError if
    it has more tokens than the model."""
    if not os.path.isfile(run / FILE):
        raise NotFoundError(f"{run} has no {FILE}: put that of its model there")
    tokenizer = Tokenizer.load(run)
    if tokenizer.vocab_size > (rows := vocabulary_of(manifest)):
        raise CheckpointError(
            f"{run / FILE} has {tokenizer.vocab_size:,} tokens, and the model's embedding {rows:,} rows: it is another "
            "model's tokenizer"
        )
    begin, template = tokenizer.first_ids(), own_template(run)
    if begin and ("imported" in manifest.meta or (template and template.begins_with(tokenizer.decode(begin)))):
        tokenizer.begin_ids = begin
    tokenizer.end_ids = (*tokenizer.end_ids, *named_ends(run))
    return tokenizer


def named_ends(run: Path) -> list[int]:
    """Returns the tokens that end a text by the settings of the model that a run was imported from, or started from
    (eos_token_id, of generation_config.json or else of config.json)."""
    for name in ("generation_config.json", "config.json"):  # as in transformers, the first states them for the second
        with suppress(OSError, ValueError, AttributeError):
            found = read_json(run / KEPT / name).get("eos_token_id")
            if listed := [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]:
                return listed
    return []


def in_chat(loaded: LoadedRun, path: Path) -> LoadedRun:
    """Returns the same run, for which prompts are messages of a user. Raises JobError if it has no chat template."""
    chat = ChatPrompts.of_run(path, loaded.tokenizer)
    if chat is None:
        raise JobError(f"--chat: {path} has no chat template: train on data.corpus=chat, or leave it out")
    return replace(loaded, chat=chat)


def find(path: Path, step: int = 0) -> Manifest:
    """Returns a run's checkpoint of `step` (0: the newest whole one). Raises CheckpointError as `load_run` does."""
    return RunDirectory(path).checkpoint(step)


def find_on_ranks(path: Path, step: int = 0) -> Manifest:
    """Returns what `find` does on every rank of a process group; rank 0 verifies it."""
    return check(Path(on_rank_zero(lambda: str(find(path, step).path))), verify=False)


def empty_model(manifest: Manifest) -> Transformer:
    """Returns the model of a checkpoint on the meta device, where it takes no memory until it is filled."""
    job = job_of(manifest)
    if job.model.reward:
        raise JobError(f"{manifest.path} is a reward model, which has no logits: it scores texts and writes none")
    with torch.device("meta"):
        return Transformer(job.model.main, vocabulary_of(manifest)).to(DTYPES[job.train.precision])


def vocabulary_of(manifest: Manifest) -> int:
    """Returns the size of a checkpoint's vocabulary. Raises CheckpointError if it states none."""
    try:
        size = field(manifest.meta, "vocab_size", int)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {manifest.path}: its metadata is not valid: {error}") from None
    if not 1 <= size <= LARGEST_VOCABULARY:
        raise CheckpointError(
            f"checkpoint {manifest.path}: a vocabulary of {size:,} tokens; at least 1, at most {LARGEST_VOCABULARY:,}"
        )
    return size


@torch.no_grad()
def fill(model: Transformer, manifest: Manifest, device: torch.device, tp: int = 1, rank: int = 0) -> None:
    """Moves a model, or a rank's part of it, from meta to `device` with its checkpoint's parameters, read one at a
    time: all that `model` has of them, or the slices of tensor rank `rank` of `tp`. Raises CheckpointError if the
    checkpoint does not match."""
    allocate(model, device)
    shapes = parameter_shapes(job_of(manifest).model, vocabulary_of(manifest))  # with modules for further tokens
    with Reader(manifest) as tensors:
        tensors.require(shapes)
        for name, parameter in model.named_parameters():
            cut = slice_of(name, shapes[name], model.config, tp, rank)
            if cut.dim is None:
                parameter.copy_(tensors.read(name))
                continue
            parameter.zero_()  # what the vocabulary is padded with
            if cut.real:
                box = Box.of(cut.whole).moved(cut.dim, cut.start, cut.real)
                parameter.narrow(cut.dim, 0, cut.real).copy_(tensors.read(name, box))


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
        self._requests: list[TextRequest] = []

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
            found.append((f"{title}\n" if len(self) > 1 else "") + self._loaded.tokenizer.shown(prompt))
        return found

    def run(self, engine: Engine, output: OrderedOutput | None, assisted: bool = True, **options: Any) -> None:
        """Generates all texts, with the `options` of Sampling, and shows them in `output` as they grow."""
        self._requests = [
            TextRequest(
                self._loaded.tokenizer,
                prompt,
                Sampling(**options, sample=sample),
                self._stop,
                ends=self._ends,
                give=partial(output.give, number) if output else lambda _: None,
                on_end=partial(output.end, number) if output else lambda: None,
                assisted=assisted,
            )
            for number, (prompt, sample) in enumerate(self._texts)
        ]
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
        decode = self._loaded.tokenizer.shown
        return [
            {
                "prompt": decode(prompt),
                "sample": sample,
                "text": decode(prompt) + request.stream.text,
                "tokens": len(request.new_tokens),
                "finish": request.finish or "interrupted",
            }
            for (prompt, sample), request in zip(self._texts, self._requests, strict=True)
        ]


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
