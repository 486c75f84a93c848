"""`phalanx test-dist [JOB]`: values and speed of collectives, stragglers, pairs of ranks, a short training."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.bounded import parse_json, read_bytes
from phalanx.check.load import as_yaml
from phalanx.cli.bench import say_how_busy
from phalanx.cli.files import OutputFiles, write
from phalanx.cli.option import Option
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import Words, job_verb
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.ranks import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from phalanx.machine.self_test import SelfTestOptions
    from phalanx.machine.self_test_report import DistReport

VERB = job_verb(
    "test-dist",
    "Tests the ranks of a job before it trains: every collective on every axis of the layout gives exact values and is "
    "timed, slow ranks and slow pairs of ranks are named, and a short training has the same loss on all ranks. Starts "
    "the processes on this machine, unless torchrun, srun or mpiexec already did. Without a layout all processes are "
    "dp_replicate; without a model a tiny GPT is trained.",
    (
        ("test-dist --nproc-per-node 4 --html test.html", "four ranks of this machine"),
        ("test-dist job.yaml --quick", "the ranks of a job"),
    ),
    {"quick": "Fewer sizes and repeats: under 10 s on two processes."},
    {
        "nproc_per_node": Option(
            int, 0, "Processes on this machine, without a layout: by default one per GPU, or 2 on CPUs.", at_least=1
        ),
        "html": Option(str, "", "Write a page with plots and tables.", value="FILE"),
        "svg": Option(str, "", "Write the page's pictures to this folder.", value="FOLDER"),
        "traces": Option(
            str, "traces", "Folder for the profiles of the training and for reports of hangs.", value="FOLDER"
        ),
        "timeout": Option(
            float, 60.0, "Seconds that a collective may wait; a hang is named after half of them.", at_least=1
        ),
    },
)
STOPPED = "before everything was tested; nothing was written."
WATCHDOG_REPORT, MOST_BYTES = "hang.json", 2**24


@VERB.starts
def run(argv: Sequence[str]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported, or the profiler prints lines of its own
    return run_on_ranks(partial(_parse, argv), _launch, _be_a_rank, lambda words: words.options["timeout"])


class FoundError(RunError):
    """The self-test found wrong values, or losses that differ or are not finite."""


def _parse(argv: Sequence[str], ranks: Ranks | None) -> Words | None:
    """Returns the words, with a layout for all ranks if they have none; without `ranks` as --nproc-per-node says, or
    one per GPU. Raises JobError if the layout needs another number. Rank 0 makes the folders before the ranks meet."""
    words = VERB.parse(argv)
    if words is None:
        return words
    OutputFiles.of(words, "html")
    given = {path for path, origin in words.loaded.origins.items() if origin != "default"}
    more: list[str] = [] if any(path.startswith("model.") for path in given) else ["model=tiny"]
    more += ["data.corpus=random"] if more and "data.corpus" not in given else []
    wanted = ranks.world if ranks else words.options["nproc_per_node"]
    if not any(path.startswith("layout.") for path in given):
        gpus = 0
        if not wanted and words.job.cluster.device != "cpu":
            import torch

            gpus = torch.cuda.device_count()
        more.append(f"layout.dp_replicate={wanted or gpus or 2}")
        if "train.global_batch" not in given:
            more.append("layout.micro_batch=8")
    if more:
        words = VERB.parse([*argv, *more])
        assert words is not None, "the first time they were words of a job, too"
    needed = words.job.layout.processes
    if wanted and wanted != needed:
        raise JobError(
            f"layout {words.job.layout.line()} needs {needed} processes, but there are {wanted}: start {needed}, or "
            f"leave out the layout, and all of them are dp_replicate={wanted}"
        )
    if ranks is not None and ranks.rank == 0:
        _make_folders(words.options)
    return words


def _launch(words: Words) -> int:
    """Starts the ranks on this machine, which run the same command on the resolved job."""
    job = words.job
    if job.run.nnodes or (job.cluster.nodes > 1 and words.loaded.origins["cluster.nodes"] != "default"):
        raise JobError(
            "phalanx test-dist starts processes on this machine only: for several nodes run it with torchrun, srun or "
            "mpiexec"
        )
    from phalanx.launch.local import launch_local
    from phalanx.launch.verdict import WATCHDOG_CODE
    from phalanx.train.device import threads_for

    _make_folders(words.options)
    processes = job.layout.processes
    folder = Path(tempfile.mkdtemp(prefix="phalanx_test_dist_"))
    config = folder / "config.yaml"
    config.write_text(as_yaml(words.loaded), encoding="utf-8")
    options = _options(words)
    code = launch_local(
        ["test-dist", str(config), *_rank_words(words)],
        processes=processes,
        log_dir=folder,
        threads=threads_for(job.run.threads, processes),
        all_ranks=job.run.all_ranks,
        grace_s=5.0,
        stopped=STOPPED,
        limits=options.limits,
    )
    if code == 0:
        shutil.rmtree(folder)
    if code != WATCHDOG_CODE:
        return code
    if "json" in words.switches:
        _show_hang(folder)
    return RunError.exit_code


def _rank_words(words: Words) -> list[str]:
    """Returns the options for the ranks: absolute paths, and what is not the default."""
    found = [f"--{name}" for name in ("quick", "json") if name in words.switches]
    files = [name for name in ("html", "svg", "traces") if words.options[name]]
    found += [f"--{name}={Path(words.options[name]).absolute()}" for name in files]
    return [*found, f"--timeout={words.options['timeout']}"]


def _options(words: Words) -> SelfTestOptions:
    from phalanx.machine.self_test import SelfTestOptions

    traces = Path(words.options["traces"]) if words.options["traces"] else None
    return SelfTestOptions("quick" in words.switches, words.options["timeout"], traces)


def _be_a_rank(words: Words, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.launch.process_group import device_of
    from phalanx.machine.self_test import self_test
    from phalanx.train.device import choose, threads_for

    job, options = words.job, _options(words)
    if ranks.rank == 0:
        say_how_busy()
    kind = choose(job.cluster.device, 0).type
    report = self_test(
        job, ranks, device_of(ranks, kind), threads_for(job.run.threads, ranks.local_world or 1), options, store
    )
    if ranks.rank == 0:
        _show(report, words)
    if not report.ok:
        raise FoundError(f"the test found {report.verdict().removeprefix('FAILED: ')}")
    return 0


def _make_folders(options: Mapping[str, Any]) -> None:
    """Makes the folders. Raises JobError."""
    problems = []
    for name in ("traces", "svg"):
        try:
            if options[name]:
                Path(options[name]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"--{name} {options[name]}: the folder cannot be created: {error.strerror}")
    if problems:
        raise JobError(problems)


def _show(report: DistReport, words: Words) -> None:
    """Prints the result, and writes the page and its pictures."""
    from phalanx.machine.self_test_report import page, pictures

    html, svg = words.options["html"], words.options["svg"]
    files = {html: page(report)} if html else {}
    if svg:
        files |= {str(Path(svg, f"{name}.svg")): drawn for name, drawn in pictures(report).items()}
    words.show({**report.as_dict(), "written": list(files)}, report.text())
    for path, text in files.items():
        write(path, text)  # only now: a full disk must not cost the result
        if not words.as_json:
            echo(f"written: {path}")


def _show_hang(folder: Path) -> None:
    """Prints the JSON document of a test that the watchdog has ended."""
    report = {}
    for path in sorted(folder.glob(f"attempt_*/{WATCHDOG_REPORT}")):
        report = parse_json(read_bytes(path, MOST_BYTES))
    message = report.get("message", "") if isinstance(report, dict) else ""
    echo(json.dumps({"ok": False, "verdict": "FAILED: ranks hang", "failures": [message], "hang": report}, indent=1))
