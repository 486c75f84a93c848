"""`phalanx VERB ...`: finds the verb, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import codecs
import gc
import importlib
import io
import os
import platform
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import phalanx
from phalanx.echo import echo, shortened
from phalanx.errors import JobError, OutputError, PhalanxError
from phalanx.gc import gc_paused
from phalanx.launch.detected import detected
from phalanx.launch.output import unblocked
from phalanx.launch.ranks import LAUNCHER_PID, ToldError, lowest_evidence
from phalanx.nearest import nearest
from phalanx.registry import blamed, noting_package

if TYPE_CHECKING:
    from phalanx.cli.verb import Verb


VERBS = {
    "init": "write a job file with a planned layout: five questions, or options",
    "train": "train a job, or resume its run",
    "launch": "start a job under Slurm, PBS, MPI or ssh, or submit it",
    "verify": "check that every layout computes what one process computes",
    "generate": "generate text from the newest checkpoint of a run",
    "serve": "serve a run over HTTP, with OpenAI's endpoints",
    "checkpoint": "list, show, verify, convert and compare checkpoints",
    "import": "weights of another program (Hugging Face) as a run",
    "evaluate": "perplexity of runs on any text, or tasks of lm-eval",
    "export": "write the model of a run as a Hugging Face folder",
    "data": "prepare a corpus: tokenize it into shards",
    "plan": "choose the layout of a job: the fastest that fits, and why",
    "predict": "time, memory and traffic of a step on any machine, without it",
    "report": "a run as a page with pictures, or several runs compared",
    "watch": "the live view of a run, from any terminal",
    "profile": "where the time of profiled steps went, beside the prediction",
    "dryrun": "run the real program of a rank, at any size, without hardware",
    "simulate": "a step as a timeline, with slow devices, links and failures",
    "goodput": "the time that failures take, by cause, and what remedies bring",
    "doctor": "check this machine, or all nodes, before a run",
    "bench": "measure this machine, for predictions on cluster=local",
    "test-dist": "test the started ranks: collectives, stragglers, slow pairs",
    "models": "known models, with parameters, kinds and sources",
    "schedule": "pipeline schedules: list, draw, measure and check them",
    "collectives": "algorithms of collectives: list, draw, count and check them",
    "schema": "every field of a job: as JSON schema for editors, or as a page",
    "completion": "completion of verbs, options and fields for bash, zsh or fish",
    "examples": "write the example jobs, or list them",
    "docs": "print a page of the documentation, or list the pages",
    "extensions": "what installed packages add: schedules, machines, corpora",
}
ELSEWHERE = {
    **dict.fromkeys(("run", "finetune", "fine-tune", "pretrain", "sft", "resume"), "train job.yaml"),
    **dict.fromkeys(("convert", "merge"), "checkpoint convert"),
    "from": "plan --from FILE",
    "sweep": "predict job.yaml --sweep FIELD=A,B",
    "rehearse": "dryrun job.yaml",
    "chat": "generate RUN --chat",
    "version": "--version",
    "inspect": "data inspect FILE",
}
"""Verbs of other programs, and words of the pages, with what they are here."""
EXIT_CODES = {
    "0": "done",
    "1": "failed",
    "2": "bad usage or job",
    "3": "does not fit",
    "4": "data, checkpoint or state corrupt",
    "5": "stopped on NaN or a spike",
    "75": "stopped cleanly (run the same command again to resume)",
    "124": "ended by the watchdog",
    "128+n": "ended by signal n",
}
"""The exit codes of all verbs."""


_MODULES = {
    verb: module
    for module, verbs in {
        "inference": ("generate", "serve", "evaluate"),
        "installation": ("docs", "examples", "extensions", "completion", "schema"),
        "machine": ("test-dist", "bench"),
        "predict": ("plan", "simulate"),
        "programs": ("schedule", "collectives"),
        "report": ("watch", "profile"),
        "weights": ("models", "import", "export", "checkpoint"),
    }.items()
    for verb in verbs
}
"""The modules of verbs that have not their name."""


def description_of(verb: str) -> Verb:
    """Imports the module that describes and runs a verb, and returns what the verb takes."""
    with gc_paused():
        module = importlib.import_module(f"phalanx.cli.{_MODULES.get(verb, verb.replace('-', '_'))}")
    return getattr(module, verb.upper().replace("-", "_") if verb in _MODULES else "VERB")


OF_RANKS = ("train", "launch", "generate", "evaluate", "doctor", "bench", "test-dist")
"""The verbs that know what to do as one of several ranks. The others are the work of one process."""
_PAGES = ("-h", "--help", "--print-config")

EXAMPLES = [
    ("phalanx init", "five questions, and a job file for this machine"),
    ("phalanx train examples/main.yaml --steps 50", "two processes on this machine, a minute"),
    ("phalanx plan model=llama3-8b cluster=dgx-h100:2 precision=bf16", "a machine that you do not have"),
]
MORE = (
    "`phalanx VERB --help` shows a verb's options and examples, `phalanx train --help layout` the fields of a job's "
    "section. A job file and key=value set the same fields; the command line wins.",
    f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
)


def command() -> int:
    """Runs the command line and returns the exit code, unless torch's modules are there, which are slow to end."""
    try:
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    except KeyboardInterrupt:  # after the verb, while its output is written
        code = _interrupted()
    if "torch" in sys.modules:
        from phalanx.launch.lifeline import leave

        leave(code)
    gc.freeze()  # at its end Python would search all that a plan has made for reference cycles: a tenth of its time
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. A user's mistake is a message; a bug keeps its traceback."""
    _escape_what_the_locale_lacks()
    os.umask(os.umask(0o077) | stat.S_IWOTH)  # nothing is writable for everyone, whatever the umask
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # A reader who is slow or gone must not stop training. Other verbs have nothing to do without one.
        with unblocked() if words[:1] == ["train"] else nullcontext():
            code = told(lambda: run(words))
            _flush()
            return code
    except OutputError as error:  # a full disk behind > FILE
        _discard_output()
        return error.exit_code
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE


def told(work: Callable[[], int]) -> int:
    """Returns the exit code of some work, of which a user's mistake is a message. Raises OutputError after it."""
    try:
        with noting_package():
            return work()
    except ToldError as error:  # another rank prints it
        return error.exit_code
    except OutputError as error:
        with suppress(OutputError, OSError):
            echo(message_of(error), file=sys.stderr)
        raise
    except PhalanxError as error:
        echo(message_of(error), file=sys.stderr, wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    echo("phalanx: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _escape_what_the_locale_lacks() -> None:
    """Makes a stream that is not UTF-8 (PYTHONIOENCODING=ascii, an old locale) show × as an escape, as standard error
    does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Writes what standard output still holds. Raises OutputError, after its message, if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        wrong = OutputError(f"the output cannot be written: {error.strerror}")
        with suppress(OutputError, OSError):
            echo(message_of(wrong), file=sys.stderr)
        raise wrong from None


def _discard_output() -> None:
    """Sends the streams whose reader (head, less) is gone to /dev/null: Python flushes them once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(argv: Sequence[str]) -> int:
    """Runs the command line and raises errors: the entry point of ranks started by the launcher."""
    if _is_left_to_rank_0(argv):
        return 0
    if argv[:1] == ["help"] and argv[1:2]:
        argv = [argv[1], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help", "help"):
        echo("\n".join(_usage()))
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version  # imported here, because it takes as long as all other imports

        torch = version("torch")
        echo(f"phalanx {phalanx.__version__}  torch {torch}  python {platform.python_version()}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        meant = ELSEWHERE.get(verb) or nearest(verb, VERBS)
        hint = f"did you mean `phalanx {meant}`?" if meant else f"the verbs are: {', '.join(VERBS)}"
        if verb.endswith((".yaml", ".yml")):
            hint = f"put the verb first: `phalanx train {verb}`"
        raise JobError(f"no verb {verb!r}; {hint}")
    return description_of(verb).run(rest)


def _usage() -> Iterator[str]:
    from phalanx.cli.verb import filled, in_columns, page_width

    width = page_width()
    yield from filled(f"phalanx {phalanx.__version__}: N-D parallel language-model training from one job file", width)
    yield from ("", *filled("usage: phalanx VERB [JOB.yaml ...] [key=value ...] [--key value ...]", width), "")
    yield from in_columns([*VERBS.items()], width, clips=True)
    yield from ("", "examples:")
    yield from in_columns(EXAMPLES, width)
    for paragraph in MORE:
        yield from ("", *filled(paragraph, width))


def _is_left_to_rank_0(argv: Sequence[str]) -> bool:
    """Returns whether another launcher started this process as one of several, and the words ask for what one process
    does: rank 0 does it, which is said once. Otherwise N ranks would each do it, into the same files."""
    is_page = not argv or bool({*_PAGES} & {*argv}) or argv[1:2] == ["help"]
    if LAUNCHER_PID in os.environ or (not is_page and argv[0] in OF_RANKS):
        return False
    # Incomplete variables without a sign of a launcher are no reason not to plan.
    if "RANK" not in os.environ and lowest_evidence(os.environ) is None:
        return False
    ranks = detected(os.environ)
    if ranks is None or ranks.world == 1:
        return False
    if not is_page and ranks.rank == 0 and argv[0] in VERBS:
        echo(f"phalanx {argv[0]} runs once: rank 0 of {ranks.world} does it, the others end", file=sys.stderr)
    return ranks.rank > 0


def message_of(error: PhalanxError) -> str:
    """Returns the message for the user: one line, or a numbered head with a line for each problem of a job."""
    if isinstance(error, JobError) and len(error.problems) > 1:
        lines = "\n".join(f"  {shortened(problem, 2000)}" for problem in error.problems)
        return f"phalanx: {blamed(error)}{len(error.problems)} problems:\n{lines}"
    return f"phalanx: {blamed(error)}{shortened(str(error))}"
