"""`phalanx generate RUN`: text from a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import WHOLE, Verb, command_of
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.generate.sampling import Sampling, read_prompts
from phalanx.generate.text import OrderedOutput
from phalanx.launch.ranks import Ranks
from phalanx.train.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.generate.load import LoadedRun


@dataclass(frozen=True)
class Generate:
    """The options of `phalanx generate`."""

    run: Path
    """The run's directory, such as runs/main."""
    prompt: Annotated[str, {"empty": "a text needs a token to begin with; without the option it is a newline"}] = "\n"
    """Beginning of the text; by default a newline."""
    prompts: Annotated[Path | None, {"value": "FILE"}] = None
    """A file of prompts, one per line, or .jsonl with a string or {"prompt": ...} per line."""
    chat: bool = False
    """A prompt is a user's message, written as the run's chat template has it; the text ends where the answer does."""
    samples: Annotated[int, {"at_least": 1}] = 1
    """Texts per prompt, each with random draws of its own."""
    max_new_tokens: int = 200
    """Tokens to generate per text."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token each time (greedy)."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 samples from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to p; 1 samples from all."""
    seed: int = 1337
    """Seed of the sampling."""
    stop: tuple[str, ...] = ()
    """Ends a text before this string; may be given several times."""
    ignore_end: bool = False
    """Go on after an end-of-text token."""
    batch: Annotated[int, {"at_least": 1}] = 8
    """Texts that are computed together at most."""
    assistant: Annotated[Path | None, {"value": "RUN"}] = None
    """The run of a smaller model that proposes tokens (speculative decoding); the text stays the model's."""
    draft_tokens: Annotated[int, {"at_least": 1}] = 4
    """Tokens that the assistant proposes at a time."""
    compare: bool = False
    """With an assistant: generate without it first, and compare the speed."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    tp: Annotated[int, {"at_least": 1}] = 1
    """Tensor ranks that share the matrices and the KV cache, for a model that does not fit on one device."""
    pp: Annotated[int, {"at_least": 1}] = 1
    """Pipeline ranks that share the layers."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


VERB = Verb(
    "generate",
    "Generates text from a run's newest checkpoint, or from that of --step. The same seed gives the same text.",
    {WHOLE: command_of(Generate)},
    (
        ("generate runs/main --prompt 'def '", "one text"),
        ("generate runs/main --prompts prompts.txt --samples 4 --json", "four texts per prompt"),
    ),
)


@VERB.starts
def run(argv: Sequence[str]) -> int:
    if VERB.answers_help(argv):
        return 0
    return run_on_ranks(partial(_parse, argv), partial(_start, argv), _be_a_rank)


def _start(argv: Sequence[str], options: Generate) -> int:
    for path in filter(None, (options.run, options.assistant)):
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    if options.pp == options.tp == 1:
        from phalanx.generate.load import load_run

        _write(load_run(options.run, options.step, options.device), options)
        return 0
    from phalanx.generate import ranks as rank_group

    return rank_group.launch(["generate", *argv], options.run, options.step, options.tp, options.pp)


def _parse(argv: Sequence[str], ranks: Ranks | None) -> Generate:
    """Returns the options. Raises JobError with every problem of them, or if the number of processes that a launcher
    has started does not fit."""
    options, problems = VERB.read_as(Generate, argv)
    problems += Sampling(**_sampling_of(options)).problems()
    if options.prompts and options.prompt != Generate.prompt:
        problems.append("--prompt and --prompts: give one of them")
    if options.compare and not options.assistant:
        problems.append("--compare compares with an assistant: give --assistant RUN, too")
    if problems:
        raise JobError(problems)
    if ranks is not None and options.tp * options.pp != ranks.world:
        raise JobError(
            f"{ranks.source} started {ranks.world} processes, but --tp {options.tp} × --pp {options.pp} is "
            f"{options.tp * options.pp}: give --pp {ranks.world}, which cuts the layers into {ranks.world} parts, "
            f"or start {options.tp * options.pp}"
        )
    return options


def _be_a_rank(options: Generate, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.generate import ranks as rank_group

    place = options.run, options.step, options.device, options.tp, options.pp
    with rank_group.joined(ranks, *place, store) as loaded:
        if loaded is not None:
            _write(loaded, options)
    return 0


def _write(loaded: LoadedRun, options: Generate) -> None:
    """Generates the texts and prints them."""
    from phalanx.generate.load import TextBatch, comparison, in_chat, line

    prompts = read_prompts(options.prompts) if options.prompts else [options.prompt]
    stop = options.stop
    if options.chat:
        loaded = in_chat(loaded, options.run)
        stop = (*stop, *([loaded.chat.end] if loaded.chat and loaded.chat.end else []))
    batch = TextBatch(loaded, prompts, options.samples, stop, options.ignore_end)
    engine = batch.engine(options.assistant, options.device, options.draft_tokens, options.batch)
    sampling = _sampling_of(options)
    plain = batch.measure_plain(engine, **sampling) if options.compare else None
    shown = None if options.json else OrderedOutput(_terminal_or_file(), batch.beginnings())
    interrupted = False
    try:
        batch.run(engine, shown, **sampling)
    except KeyboardInterrupt:  # what there is counts
        interrupted = True
    speeds = comparison(plain, engine.stats) if plain else {}
    if shown:
        shown.interrupt()
    else:
        texts = batch.results()
        document = {**dataclasses.asdict(options), "texts": texts, "stats": engine.stats.summary() | speeds}
        if len(texts) == 1:
            document["text"] = texts[0]["text"]
        echo(json.dumps(document, default=str))
    for numbers in (engine.stats.summary(), speeds):
        if numbers:
            echo(line(numbers), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt


def _sampling_of(options: Generate) -> dict[str, Any]:
    """Returns the options of `Sampling`."""
    return {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}


def _terminal_or_file() -> Callable[[str], None]:
    """Returns what writes a piece of text at once: a pipe or a file gets it as it is."""

    def raw(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    return (lambda piece: echo(piece, end="", flush=True)) if sys.stdout.isatty() else raw
