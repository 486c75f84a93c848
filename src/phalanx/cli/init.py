"""`phalanx init`: a job file with comments and a planned layout, from five questions or from options."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.job_file import as_job_file
from phalanx.cli.job_plan import HERE, SMALL, NewJob, machine_of, planned_job
from phalanx.cli.option import Option
from phalanx.cli.schema import schema_text
from phalanx.config.corpora import CORPORA
from phalanx.config.presets import FROM_FILE, named, preset_of
from phalanx.echo import echo
from phalanx.errors import JobError, RunError

FILES = ("text", "mix", "chat", "preferences")
"""Corpora that are files of the user."""
VERB = CommandVerb(
    "init",
    "Writes a job file with comments, and a layout planned for the machine.",
    {
        WHOLE: Command(
            ("[FILE]",),
            {
                "cluster": Option(
                    str,
                    "",
                    "machine: this (the default), or one that you plan for, such as dgx-h100:4",
                    value="NAME[:NODES]",
                ),
                "model": Option(
                    str,
                    "",
                    "the model: small (the default here), a preset (`phalanx models`), hf:FOLDER, or a run's directory",
                    value="NAME",
                ),
                "data": Option(
                    str,
                    "",
                    f"the corpus: {', '.join(name for name in CORPORA if name not in FILES)}, or your text or JSONL",
                    value="NAME|PATH",
                ),
                "batch": Option(int, 0, "sequences per step over all devices", at_least=1),
                "steps": Option(int, 0, "optimizer steps", at_least=1),
            },
            switches={
                "yes": "ask nothing",
                "force": "replace an existing file",
                "no_plan": "write `layout: auto`: the layout is planned when training starts",
            },
        )
    },
    (
        ("init", "five questions"),
        ("init big.yaml --model llama3-8b --cluster dgx-h100:2 --yes", "none"),
    ),
    (
        "FILE is job.yaml unless given. On a terminal it asks for what no option says; elsewhere, and with --yes, it "
        "takes the defaults. An existing file is replaced only if you say so. Beside it lies phalanx.schema.json, with "
        "which an editor completes and checks the file.",
    ),
    default=WHOLE,
)
QUESTIONS = ("cluster", "model", "data", "batch", "steps")
"""The options that are asked for where they are not given."""
SCHEMA = "phalanx.schema.json"
STEPS = 500
SMALL_BATCH = 32
TOKENS_PER_STEP = 2**20
"""Tokens per step proposed for a cluster: a million, about that of published runs of 1 to 8 billion parameters."""


@dataclass(frozen=True)
class Question:
    """One question."""

    option: str
    text: str
    default: str
    check: Callable[[str], object]
    """Raises JobError or ValueError about a wrong answer."""


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    path = Path(words.subjects[0] if words.subjects else "job.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise JobError(f"a job file ends in .yaml, found {str(path)!r}; nearest: {path.with_suffix('.yaml')}")
    given = {name: str(value) for name, value in words.options.items()}
    asks = "yes" not in words.switches and sys.stdin.isatty() and sys.stderr.isatty()
    _require_free(path, forced="force" in words.switches, asks=asks)
    job = _answers(given, asks)
    loaded, facts = planned_job(job, path, plans="no_plan" not in words.switches)
    _write(path, as_job_file(loaded, facts, f"phalanx train {path}", SCHEMA))
    _write_schema(path.parent / SCHEMA)
    echo(f"written: {path}\n  layout:  {loaded.job.layout.line()}{f'  ({facts})' if facts else ''}", wrap=True)
    if job.cluster == HERE:
        echo(
            f"  train:   phalanx train {path}\n"
            f"  change:  edit it (`phalanx docs job`), or phalanx train {path} --steps 1000"
        )
    else:
        echo(f"  predict: phalanx predict {path}\n  there:   phalanx launch {path} --nnodes {loaded.job.cluster.nodes}")
    return 0


def _require_free(path: Path, *, forced: bool, asks: bool) -> None:
    """Raises JobError if the file exists and is not to be replaced, or if its folder does not exist."""
    if not os.path.isdir(path.parent):
        raise JobError(f"folder {path.parent} does not exist; create it, or name another file")
    if forced or not os.path.exists(path):
        return
    if not asks or _asked(f"{path} exists. Replace it? (y/n)", "n").lower() not in ("y", "yes"):
        raise JobError(f"{path} exists and was not changed; name another file, or --force replaces it")


def _answers(given: dict[str, str], asks: bool) -> NewJob:
    """Returns what the options say, else the answers, else the defaults. Raises JobError with all wrong options."""
    problems: list[str] = []
    answers: dict[str, str] = {}
    for name in QUESTIONS:
        question = _question(name, answers)
        try:
            if name in given:
                question.check(given[name])
                answers[name] = given[name]
            else:
                answers[name] = _ask(question) if asks else question.default
        except (JobError, ValueError) as error:
            problems.append(f"--{name}: {error}")
            answers[name] = question.default
    if problems:
        raise JobError(problems)
    return NewJob(answers["cluster"], answers["model"], answers["data"], int(answers["batch"]), int(answers["steps"]))


def _question(name: str, answers: dict[str, str]) -> Question:
    """Returns a question, whose default depends on earlier answers."""
    if name == "cluster":
        text = (
            f"1/5  Machine: this ({_devices_here()}), or one to plan for, such as dgx-h100:4 (`phalanx docs devices`)"
        )
        return Question(name, text, HERE, lambda text: text == HERE or machine_of(text))
    here = answers["cluster"] == HERE
    if name == "model":
        text = "2/5  Model: small (0.9 million parameters), a preset (`phalanx models`), hf:FOLDER, or a run"
        return Question(name, text, SMALL if here else "llama3.1-8b", _check_model)
    if name == "data":
        text = "3/5  Data: stdlib (Python's own library), shakespeare_char (downloads), random, or your text or JSONL"
        return Question(name, text, "stdlib" if here else "random", _check_data)
    if name == "batch":
        batch = SMALL_BATCH if here else _batch_for(answers)
        return Question(name, "4/5  Global batch: sequences per step over all devices", str(batch), _check_count)
    return Question(name, "5/5  Training: optimizer steps", str(STEPS), _check_count)


def _ask(question: Question) -> str:
    while True:
        answer = _asked(question.text, question.default)
        try:
            question.check(answer)
            return answer
        except (JobError, ValueError) as error:
            echo(f"     {error}", file=sys.stderr, wrap=True)


def _asked(text: str, default: str) -> str:
    """Returns the answer to a question on standard error, so that standard output stays free for results."""
    echo(f"{text}\n     [{default}]: ", file=sys.stderr, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise JobError("the input ended before all questions were answered: nothing was written")
    return line.strip() or default


def _devices_here() -> str:
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    return f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else f"{cores} core{'s' * (cores != 1)}, no GPU"


def _check_model(text: str) -> None:
    if text != SMALL and not os.path.isdir(text):
        preset_of(text if text.startswith(FROM_FILE) else named(text))


def _check_data(text: str) -> None:
    if text in FILES:
        raise ValueError(f"corpus {text} is files of your own: give their path")
    if text not in CORPORA and not os.path.exists(text):
        raise ValueError(f"neither a corpus ({', '.join(CORPORA)}) nor a file or folder: {text!r}")


def _check_count(text: str) -> None:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise ValueError(f"expected a whole number of at least 1, found {text!r}")


def _batch_for(answers: dict[str, str]) -> int:
    """Returns the number of sequences of a million tokens, at least one per device, as a power of two."""
    model = answers["model"]
    length = preset_of(named(model)).model.seq_len if model != SMALL and not os.path.isdir(model) else 128
    devices = machine_of(answers["cluster"]).devices
    wanted = max(TOKENS_PER_STEP // length, devices, 1)
    return 1 << (wanted - 1).bit_length()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from None


def _write_schema(path: Path) -> None:
    """Writes the schema, unless another file has its name."""
    try:
        ours = json.loads(path.read_text(encoding="utf-8")).get("title") == json.loads(schema_text())["title"]
    except FileNotFoundError:
        ours = True
    except (OSError, ValueError, AttributeError):
        ours = False
    if ours:
        _write(path, schema_text())
