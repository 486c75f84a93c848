"""Verbs that read the newest checkpoint of a run: `phalanx generate RUN` writes text, `phalanx serve RUN` answers HTTP
requests, `phalanx evaluate RUN ...` measures perplexity on any text, or runs the tasks of lm-eval."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from phalanx.check.job import require_cut
from phalanx.checkpoint.manifest import job_of
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import Verb, command_of, flag_of
from phalanx.config.cluster import DeviceName
from phalanx.config.corpora import CORPORA
from phalanx.config.job import RunOptions
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse as parse_layout
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.generate.sampling import Sampling, read_prompts
from phalanx.generate.text import OrderedOutput
from phalanx.launch.ranks import SINGLE, Ranks, threads_for
from phalanx.nearest import did_you_mean
from phalanx.serve.bodies import ServeLimits
from phalanx.train.run_directory import RunDirectory
from phalanx.units import aligned

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.evaluate.perplexity import Perplexity
    from phalanx.evaluate.text import ScoringOptions
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
    draft_tokens: Annotated[int, {"at_least": 1, "beside": ("assistant",)}] = 4
    """Tokens that the assistant proposes at a time."""
    compare: bool = False
    """With an assistant: generate without it first, and compare the speed."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: DeviceName = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    tp: Annotated[int, {"at_least": 1}] = 1
    """Tensor ranks that share the matrices and the KV cache, for a model that does not fit on one device."""
    pp: Annotated[int, {"at_least": 1}] = 1
    """Pipeline ranks that share the layers."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


GENERATE = Verb(
    "generate",
    "Generates text from a run's newest checkpoint, or from that of --step. The same seed gives the same text.",
    command_of(Generate),
    (
        ("generate runs/main --prompt 'def '", "one text"),
        ("generate runs/main --prompts prompts.txt --samples 4 --json", "four texts per prompt"),
    ),
)


@GENERATE.starts
def generate(argv: Sequence[str]) -> int:
    if GENERATE.answers_help(argv):
        return 0
    return run_on_ranks(partial(_generate_options, argv), partial(_start_generating, argv), _generating_rank)


def _start_generating(argv: Sequence[str], options: Generate) -> int:
    for path in filter(None, (options.run, options.assistant)):
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    if options.pp == options.tp == 1:
        from phalanx.generate.load import load_run

        _write(load_run(options.run, options.step, options.device), options)
        return 0
    require_cut(
        job_of(RunDirectory(options.run).checkpoint(options.step, verify=False)).model.main, options.tp, options.pp
    )
    from phalanx.launch.local import launch_briefly

    return launch_briefly(
        ["generate", *argv],
        processes=options.tp * options.pp,
        # Only one stage computes at a time, so its ranks share all cores, as one process would have them.
        threads=threads_for(0, options.tp),
        stopped="while {} of {} ranks were generating.",
        preload=["phalanx.cli.inference", "phalanx.generate.ranks"],
    )


def _generate_options(argv: Sequence[str], ranks: Ranks | None) -> Generate:
    """Returns the options. Raises JobError with every problem of them, or if the number of processes that a launcher
    has started does not fit."""
    options, problems = GENERATE.read_as(Generate, argv)
    problems += Sampling(**_sampling_of(options)).problems()
    if options.prompts and options.prompt != Generate.prompt:
        problems.append("--prompt and --prompts: give one of them")
    drawn = (
        name for name in ("samples", "top_k", "top_p", "seed") if getattr(options, name) != getattr(Generate, name)
    )
    if not options.temperature and (idle := ", ".join(map(flag_of, drawn))):
        problems.append(f"{idle}: no effect with --temperature 0, which takes the most likely token each time")
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


def _generating_rank(options: Generate, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.generate import ranks as rank_group

    place = options.run, options.step, options.device, options.tp, options.pp
    with rank_group.joined(ranks, *place, store) as loaded:
        if loaded is not None:
            _write(loaded, options)
    return 0


def _write(loaded: LoadedRun, options: Generate) -> None:
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
        asked = dataclasses.asdict(options) | ({"prompt": None} if options.prompts else {})
        document = {**asked, "texts": texts, "stats": engine.stats.summary() | speeds}
        if len(texts) == 1:
            document["text"] = texts[0]["text"]
        echo(json.dumps(document, default=str))
    for numbers in (engine.stats.summary(), speeds):
        if numbers:
            echo(line(numbers), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt


def _sampling_of(options: Generate) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}


def _terminal_or_file() -> Callable[[str], None]:
    """Returns what writes a piece of text at once: a pipe or a file gets it as it is."""

    def raw(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    return (lambda piece: echo(piece, end="", flush=True)) if sys.stdout.isatty() else raw


@dataclass(frozen=True)
class Serve:
    """The options of `phalanx serve`."""

    run: Path
    """The run's directory, such as runs/main."""
    host: str = "127.0.0.1"
    """Address to listen on: loopback, unless another is given."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: str = ""
    """The model's name in requests; empty: the directory's."""
    api_key_env: str = "PHALANX_API_KEY"
    """Environment variable with the key that clients must present; no key is needed while it is unset."""
    assistant: Annotated[Path | None, {"value": "RUN"}] = None
    """The run of a smaller model with the same tokenizer, which proposes tokens (speculative decoding)."""
    draft_tokens: Annotated[int, {"at_least": 1, "beside": ("assistant",)}] = 4
    """Tokens that the assistant proposes at a time."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: DeviceName = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    limits: ServeLimits = field(default_factory=ServeLimits)


SERVE = Verb(
    "serve",
    "Serves a run's newest checkpoint over HTTP, with the completions and chat endpoints of OpenAI's API. It is for "
    "trying a model out; for real load, export the model and use vLLM.",
    command_of(Serve),
    (
        ("serve runs/main", "on 127.0.0.1, port 8000"),
        ("serve runs/main --port 0 --batch 16", "on a free port, 16 texts at a time"),
    ),
)


@SERVE.starts
def serve(argv: Sequence[str]) -> int:
    if SERVE.answers_help(argv):
        return 0
    options, problems = SERVE.read_as(Serve, argv)
    problems += options.limits.problems()
    if not 0 <= options.port < 1 << 16:
        problems.append(f"port {options.port}: 0 to 65535")
    if problems:
        raise JobError(problems)
    for path in filter(None, (options.run, options.assistant)):
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    try:
        from phalanx.serve import app as server
    except ImportError as error:
        raise JobError(f"{error.name} is not installed: pip install 'phalanx[serve]'") from error
    from phalanx.data.template import ChatPrompts
    from phalanx.generate.engine import Engine
    from phalanx.generate.load import assistant_of, load_run
    from phalanx.serve.app import LOOPBACK, EngineThread, Service

    listener = server.listen(options.host, options.port)  # before the model is loaded, which may take long
    loaded = load_run(options.run, options.step, options.device)
    assistant = None
    if options.assistant:
        assistant = assistant_of(loaded, options.assistant, options.device, options.draft_tokens).decoder
    engine = Engine(loaded.decoder, assistant, draft_tokens=options.draft_tokens, max_batch=options.limits.batch)
    name = options.name or options.run.resolve().name
    key = os.environ.get(options.api_key_env, "")
    chat = ChatPrompts.of_run(options.run, loaded.tokenizer)
    service = Service(name, loaded.tokenizer, EngineThread(engine), options.limits, chat, key, options.host in LOOPBACK)
    host, port = listener.getsockname()[:2]
    echo(f"phalanx: {name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr)
    if not (service.loopback or key):
        echo(f"phalanx: warning: everyone who reaches {host} may use it: set {options.api_key_env}", file=sys.stderr)
    return server.serve(service, listener)


@dataclass(frozen=True)
class Evaluate:
    """The options of `phalanx evaluate`."""

    runs: tuple[Path, ...]
    """Directories of runs, such as runs/main; several are shown side by side."""
    corpus: str = ""
    """Score this corpus instead of the run's own."""
    files: Annotated[Path | None, {"value": "PATH"}] = None
    """Score a text or JSONL file, or a folder of them."""
    text_field: Annotated[str, {"beside": ("files",)}] = "text"
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
    device: DeviceName = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    tasks: Annotated[str, {"value": "NAMES"}] = ""
    """Run these tasks of lm-eval instead, with commas between."""
    include_path: Annotated[Path | None, {"value": "FOLDER", "beside": ("tasks",)}] = None
    """A folder with YAML files of tasks of your own."""
    chat: bool = False
    """Ask the tasks as a user's messages, written as the run's chat template has it."""
    num_fewshot: Annotated[int | None, {"beside": ("tasks",)}] = None
    """Examples in each prompt; each task has its own default."""
    limit: Annotated[int | None, {"beside": ("tasks",)}] = None
    """Use only so many samples of each task."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


EVALUATE = Verb(
    "evaluate",
    "Measures the perplexity of runs on their validation split, or on any other text; or runs tasks of lm-eval.",
    command_of(Evaluate),
    (
        ("evaluate runs/main runs/pipeline", "two runs side by side"),
        ("evaluate runs/main --files book.txt --stride 64", "on a text of your own"),
    ),
)


@EVALUATE.starts
def evaluate(argv: Sequence[str]) -> int:
    if EVALUATE.answers_help(argv):
        return 0
    return run_on_ranks(partial(_evaluate_options, argv), partial(_start_evaluating, argv), _evaluating_rank)


def _start_evaluating(argv: Sequence[str], options: Evaluate) -> int:
    for path in options.runs:
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    if options.tasks:
        return _run_tasks(options)
    layout = _layout(options)
    return _evaluating_rank(options, SINGLE) if layout.processes == 1 else _launch(argv, options, layout)


def _evaluate_options(argv: Sequence[str], ranks: Ranks | None) -> Evaluate:
    """Returns the options. Raises JobError with every problem of them, or if the number of processes that a launcher
    has started does not fit."""
    options, problems = EVALUATE.read_as(Evaluate, argv)
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
    names = ("corpus", "files", "split", "limit_mb", "context", "stride", "precision", "layout")
    of_text = [flag_of(name) for name in names if getattr(options, name) != getattr(Evaluate, name)]
    if options.chat and not options.tasks:
        problems.append("--chat is for tasks of lm-eval: name some with --tasks")
    if options.tasks and of_text:
        problems.append(
            f"{' and '.join(of_text)}: tasks of lm-eval bring their own texts, and run on one process as trained"
        )
    return problems


def _layout(options: Evaluate) -> Layout:
    return parse_layout(options.layout) if options.layout else Layout()


def _scoring(options: Evaluate) -> ScoringOptions:
    from phalanx.evaluate.text import ScoringOptions

    layout = _layout(options)
    return ScoringOptions(layout, options.batch_size, options.context, options.stride, options.precision)


def _launch(argv: Sequence[str], options: Evaluate, layout: Layout) -> int:
    """Starts the ranks of a layout, once it is known to be legal for every run."""
    from phalanx.evaluate.text import scoring_job
    from phalanx.launch.local import launch_briefly

    for path in options.runs:
        manifest = RunDirectory(path).checkpoint(options.step, verify=False)
        scoring_job(manifest, _scoring(options), options.device)
    return launch_briefly(
        ["evaluate", *argv],
        processes=layout.processes,
        threads=threads_for(0, layout.processes),
        stopped="while {} of {} ranks were evaluating.",
        preload=["phalanx.cli.inference", "phalanx.evaluate.perplexity"],
    )


def _evaluating_rank(options: Evaluate, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.config.job import Job
    from phalanx.data.corpus import left_out, sources
    from phalanx.data.files import silent, stderr_progress
    from phalanx.data.tokenizer import Tokenizer
    from phalanx.evaluate.perplexity import score
    from phalanx.evaluate.text import ScoredConversations, ScoredText, other_corpus, read_texts
    from phalanx.launch.process_group import process_group
    from phalanx.train import device as devices

    def read(job: Job, tokenizer: Tokenizer) -> list[ScoredText | ScoredConversations]:
        data = other_corpus(job.data, options.corpus, options.files, options.text_field)
        is_own = data == job.data and data.val_fraction
        if data.path and (said := left_out(data, sources(data))):
            progress(said, 0, 0)
        split = options.split if options.split != "auto" else "val" if is_own else "all"
        return read_texts(data, tokenizer, split, job.model.seq_len, options.limit_mb)

    if ranks is not SINGLE:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait until a message has come
    device = devices.choose(options.device, ranks.local_rank)
    with process_group(ranks, device=device, timeout_s=RunOptions().timeout_s, store=store), stderr_progress() as shown:
        progress = shown if ranks.rank == 0 else silent
        runs = (score(path, options.step, _scoring(options), device, read, progress) for path in options.runs)
        found = [each for run in runs for each in run]
    if ranks.rank == 0:
        text = (
            json.dumps({"runs": [each.as_dict() for each in found]}, indent=1) if options.json else perplexities(found)
        )
        echo(text, wrap=not options.json)
    return 0


def perplexities(found: Sequence[Perplexity]) -> str:
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
    for context, stride, begin in dict.fromkeys((each.context, each.stride, each.begins_with) for each in found):
        begun = f", each beginning with {begin}" if begin else ""
        lines.append(f"windows of {context:,} tokens every {stride:,}{begun}; losses in nats")
    return "\n".join(lines)


def _run_tasks(options: Evaluate) -> int:
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
