"""`phalanx evaluate RUN ...`: perplexity of runs on any text, or the tasks of lm-eval."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from phalanx.cli.option import flag_of
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import WHOLE, Verb, command_of
from phalanx.config.corpora import CORPORA
from phalanx.config.job import RunOptions
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse as parse_layout
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.launch.ranks import SINGLE, Ranks
from phalanx.nearest import did_you_mean
from phalanx.train.run_directory import RunDirectory
from phalanx.units import aligned

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.evaluate.perplexity import Perplexity, ScoringOptions


@dataclass(frozen=True)
class Evaluate:
    """The options of `phalanx evaluate`."""

    runs: tuple[Path, ...]
    """Directories of runs, such as runs/main; several are shown side by side."""
    corpus: str = ""
    """Score this corpus instead of the run's own."""
    files: Annotated[Path | None, {"value": "PATH"}] = None
    """Score a text or JSONL file, or a folder of them."""
    text_field: str = "text"
    """The field of each JSON line that holds the text."""
    split: Literal["auto", "train", "val", "all"] = "auto"
    """Part of the corpus; auto is val of the run's own corpus, and all of any other."""
    limit_mb: float = 0.0
    """Score only so many megabytes of text; 0 means all."""
    context: int = 0
    """Tokens of a window; 0 is the model's seq_len."""
    stride: int = 0
    """Tokens between the beginnings of windows; a smaller stride gives more context, takes longer; 0: the context."""
    batch_size: Annotated[int, {"at_least": 1}] = 8
    """Windows, or lm-eval's requests, in one forward pass."""
    precision: Literal["", "fp32", "fp64", "bf16", "fp16"] = ""
    """Precision; that of training if empty."""
    layout: str = ""
    """Layout in which the model is scored, such as tp=2,pp=2; one process if empty."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    tasks: Annotated[str, {"value": "NAMES"}] = ""
    """Run these tasks of lm-eval instead, with commas between."""
    include_path: Annotated[Path | None, {"value": "FOLDER"}] = None
    """A folder with YAML files of tasks of your own."""
    chat: bool = False
    """Ask the tasks as a user's messages, written as the run's chat template has it."""
    num_fewshot: int | None = None
    """Examples in each prompt; each task has its own default."""
    limit: int | None = None
    """Use only so many samples of each task."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


VERB = Verb(
    "evaluate",
    "Measures the perplexity of runs on their validation split, or on any other text; or runs tasks of lm-eval.",
    {WHOLE: command_of(Evaluate)},
    (
        ("evaluate runs/main runs/pipeline", "two runs side by side"),
        ("evaluate runs/main --files book.txt --stride 64", "on a text of your own"),
    ),
)


@VERB.starts
def run(argv: Sequence[str]) -> int:
    if VERB.answers_help(argv):
        return 0
    return run_on_ranks(partial(_parse, argv), partial(_start, argv), _be_a_rank)


def _start(argv: Sequence[str], options: Evaluate) -> int:
    for path in options.runs:
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    if options.tasks:
        return _run_tasks(options)
    layout = _layout(options)
    return _be_a_rank(options, SINGLE) if layout.processes == 1 else _launch(argv, options, layout)


def _parse(argv: Sequence[str], ranks: Ranks | None) -> Evaluate:
    """Returns the options. Raises JobError with every problem of them, or if the number of processes that a launcher
    has started does not fit."""
    options, problems = VERB.read_as(Evaluate, argv)
    if problems := [*problems, *_problems(options)]:
        raise JobError(problems)
    if ranks is None:
        return options
    layout = _layout(options)
    if options.tasks:
        raise JobError(f"tasks of lm-eval run in one process, but {ranks.source} started {ranks.world}")
    if layout.processes != ranks.world:
        raise JobError(
            f"{ranks.source} started {ranks.world} processes, but --layout {layout.line()} has {layout.processes}: "
            f"start {layout.processes}, or give a layout of {ranks.world}"
        )
    return options


def _problems(options: Evaluate) -> list[str]:
    problems = []
    if options.corpus and options.corpus not in CORPORA:
        hint = did_you_mean(options.corpus, CORPORA)
        problems.append(f"no corpus {options.corpus!r}{hint} (known: {', '.join(CORPORA)}; your own text: --files)")
    if options.corpus and options.files:
        problems.append("--corpus and --files both name a text; give one of them")
    if not 0 <= options.limit_mb < 1e12:
        problems.append(f"--limit-mb must not be negative, and below 1e12, is {options.limit_mb:g}")
    of_text = [flag_of(name) for name in ("corpus", "files", "layout", "stride") if getattr(options, name)]
    if options.chat and not options.tasks:
        problems.append("--chat is for tasks of lm-eval: name some with --tasks")
    if options.tasks and of_text:
        problems.append(f"{' and '.join(of_text)}: tasks of lm-eval bring their own texts, and run on one process")
    return problems


def _layout(options: Evaluate) -> Layout:
    return parse_layout(options.layout) if options.layout else Layout()


def _scoring(options: Evaluate) -> ScoringOptions:
    from phalanx.evaluate.perplexity import ScoringOptions

    layout = _layout(options)
    return ScoringOptions(layout, options.batch_size, options.context, options.stride, options.precision)


def _launch(argv: Sequence[str], options: Evaluate, layout: Layout) -> int:
    """Starts the ranks of a layout, once it is known to be legal for every run."""
    from phalanx.evaluate.perplexity import scoring_job
    from phalanx.generate.load import find
    from phalanx.launch.local import launch_briefly
    from phalanx.train.device import threads_for

    for path in options.runs:
        scoring_job(find(path, options.step, verify=False), _scoring(options), options.device)
    threads, stopped = threads_for(0, layout.processes), "while {} of {} ranks were evaluating."
    return launch_briefly(["evaluate", *argv], processes=layout.processes, threads=threads, stopped=stopped)


def _be_a_rank(options: Evaluate, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.config.job import Job
    from phalanx.data.files import silent, stderr_progress
    from phalanx.data.tokenizer import Tokenizer
    from phalanx.evaluate.perplexity import score
    from phalanx.evaluate.text import ScoredConversations, ScoredText, other_corpus, read_texts
    from phalanx.launch.process_group import process_group
    from phalanx.train import device as devices

    def read(job: Job, tokenizer: Tokenizer) -> list[ScoredText | ScoredConversations]:
        data = other_corpus(job.data, options.corpus, options.files, options.text_field)
        is_own = data == job.data and data.val_fraction
        split = options.split if options.split != "auto" else "val" if is_own else "all"
        return read_texts(data, tokenizer, split, job.model.seq_len, options.limit_mb)

    if ranks is not SINGLE:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait until a message has come
    device = devices.choose(options.device, ranks.local_rank)
    with (
        process_group(ranks, device=device, timeout_s=RunOptions().timeout_s, store=store),
        stderr_progress() as shown,
    ):
        progress = shown if ranks.rank == 0 else silent
        runs = (score(path, options.step, _scoring(options), device, read, progress) for path in options.runs)
        found = [each for run in runs for each in run]
    if ranks.rank == 0:
        text = json.dumps({"runs": [each.as_dict() for each in found]}, indent=1) if options.json else table(found)
        echo(text, wrap=not options.json)
    return 0


def table(found: Sequence[Perplexity]) -> str:
    """Returns the runs side by side, one row each, and the rule by which they were scored."""
    rows: list[tuple[str, ...]] = [
        ("run", "step", "text", "split", "tokens", "bytes", "loss/token", "perplexity", "loss/byte", "bits/byte")
    ]
    for each in found:
        per_byte = [f"{value:.4f}" if value is not None else "-" for value in (each.loss_per_byte, each.bits_per_byte)]
        size = f"{each.bytes:,}" if each.bytes is not None else "-"
        start = (each.run, f"{each.step}", each.text, each.split, f"{each.tokens:,}", size)
        rows.append((*start, f"{each.loss:.4f}", f"{each.perplexity:.4g}", *per_byte))
    lines = aligned(rows, "lrllrrrrrr")
    rules = dict.fromkeys((each.context, each.stride) for each in found)
    lines += [f"windows of {context:,} tokens every {stride:,}; losses in nats" for context, stride in rules]
    return "\n".join(lines)


def _run_tasks(options: Evaluate) -> int:
    """Runs tasks of lm-eval on every run, one after the other."""
    from phalanx.evaluate.harness import RequestScorer, require_harness, run_tasks
    from phalanx.generate.decoder import Decoder
    from phalanx.generate.load import in_chat, load_run

    require_harness()
    found: dict[str, Any] = {}
    for path in options.runs:
        loaded = load_run(path, options.step, options.device)
        if options.chat:
            loaded = in_chat(loaded, path)
        assert isinstance(loaded.decoder, Decoder)
        found[str(path)] = run_tasks(
            RequestScorer(loaded.decoder, loaded.tokenizer, options.batch_size, loaded.chat),
            [name.strip() for name in options.tasks.split(",") if name.strip()],
            include_path=options.include_path,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
        )
    if options.json:
        echo(json.dumps({"runs": found}, indent=1))
        return 0
    for path, tasks in found.items():
        for task, metrics in tasks.items():
            for name, value in metrics.items():
                echo(f"{path}  {task}  {name}: {f'{value:.4f}' if isinstance(value, float) else value}")
    return 0
