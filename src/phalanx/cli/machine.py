"""Verbs that measure this machine, or all nodes of a run: `phalanx test-dist [JOB]` tests the started ranks; `phalanx
bench compute | comm` measures, for `cluster=local`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.bounded import parse_json, read_bytes
from phalanx.check.load import as_yaml
from phalanx.cli.files import DARK, OutputFiles, write
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import JSON, Command, Option, Verb, Words, flag_of, job_verb
from phalanx.config.cluster import DEVICE_WORDS, DeviceName
from phalanx.config.clusters import default_path, local_fields
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.ranks import SINGLE, Ranks, threads_for
from phalanx.nearest import nearest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.machine.calibration import CalibrationReport

TEST_DIST = job_verb(
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
            "Processes on this machine, without a layout: by default one per GPU, or 2 on CPUs.", 0, at_least=1
        ),
        "html": Option("Write a page with plots and tables.", value="FILE"),
        "svg": Option("Write the page's pictures to this folder.", value="FOLDER"),
        "traces": Option("Folder for the profiles of the training and for reports of hangs.", "traces", value="FOLDER"),
        "timeout": Option("Seconds that a collective may wait; a hang is named after half of them.", 60.0, at_least=1),
    },
)
TEST_STOPPED = "before everything was tested; nothing was written."
WATCHDOG_REPORT, MOST_BYTES = "hang.json", 2**24


@TEST_DIST.starts
def test_dist(argv: Sequence[str]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported, or the profiler prints lines of its own
    return run_on_ranks(partial(_test_words, argv), _start_test, _test_rank, lambda words: words.options["timeout"])


class FoundError(RunError):
    """The self-test found wrong values, or losses that differ or are not finite."""


def _test_words(argv: Sequence[str], ranks: Ranks | None) -> Words | None:
    """Returns the words, with a layout for all ranks if they have none; without `ranks` as --nproc-per-node says, or
    one per GPU. Raises JobError if the layout needs another number. Rank 0 makes the folders before the ranks meet."""
    words = TEST_DIST.parse(argv)
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
            from phalanx.launch.accelerators import accelerators

            gpus = accelerators(words.job.cluster.device)[1]
        more.append(f"layout.dp_replicate={wanted or gpus or 2}")
        if "train.global_batch" not in given:
            more.append("layout.micro_batch=8")
    if more:
        words = TEST_DIST.parse([*argv, *more])
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


def _start_test(words: Words) -> int:
    """Starts the ranks on this machine, which run the same command on the resolved job."""
    job = words.job
    if job.run.nnodes or (job.cluster.nodes > 1 and words.loaded.origins["cluster.nodes"] != "default"):
        raise JobError(
            "phalanx test-dist starts processes on this machine only: for several nodes run it with torchrun, srun or "
            "mpiexec"
        )
    from phalanx.launch.local import launch_local
    from phalanx.launch.verdict import WATCHDOG_CODE, Restarts
    from phalanx.launch.watchdog.diagnosis import Limits

    _make_folders(words.options)
    processes = job.layout.processes
    folder = Path(tempfile.mkdtemp(prefix="phalanx_test_dist_"))
    config = folder / "config.yaml"
    config.write_text(as_yaml(words.loaded), encoding="utf-8")
    # The ranks get absolute paths, and what is not the default.
    argv = [f"--{name}" for name in ("quick", "json") if name in words.switches]
    files = [name for name in ("html", "svg", "traces") if words.options[name]]
    argv += [f"--{name}={Path(words.options[name]).absolute()}" for name in files]
    code = launch_local(
        ["test-dist", str(config), *argv, f"--timeout={words.options['timeout']}"],
        processes=processes,
        log_dir=folder,
        threads=threads_for(job.run.threads, processes),
        all_ranks=job.run.all_ranks,
        grace_s=5.0,
        stopped=TEST_STOPPED,
        limits=Limits.within(words.options["timeout"]),
        restarts=Restarts(preload=["phalanx.cli.machine", "phalanx.machine.self_test"]),
    )
    if code == 0:
        shutil.rmtree(folder)
    if code != WATCHDOG_CODE:
        return code
    if "json" in words.switches:
        _show_hang(folder)
    return RunError.exit_code


def _test_rank(words: Words, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.launch.process_group import device_of
    from phalanx.machine.self_test import SelfTestOptions, self_test
    from phalanx.train.device import choose

    traces = Path(words.options["traces"]) if words.options["traces"] else None
    job, options = words.job, SelfTestOptions("quick" in words.switches, words.options["timeout"], traces)
    if ranks.rank == 0:
        say_how_busy()
    kind = choose(job.cluster.device, 0).type
    report = self_test(
        job, ranks, device_of(ranks, kind), threads_for(job.run.threads, ranks.local_world or 1), options, store
    )
    if ranks.rank == 0:
        from phalanx.machine.self_test import page, pictures

        html, svg = words.options["html"], words.options["svg"]
        files = {html: page(report)} if html else {}
        if svg:
            files |= {str(Path(svg, f"{name}.svg")): drawn for name, drawn in pictures(report).items()}
        words.show({**report.as_dict(), "written": list(files)}, report.text())
        for path, text in files.items():
            write(path, text)  # only now: a full disk must not cost the result
            if not words.as_json:
                echo(f"written: {path}")
    if not report.ok:
        raise FoundError(f"the test found {report.verdict().removeprefix('FAILED: ')}")
    return 0


def _make_folders(options: Mapping[str, Any]) -> None:
    problems = []
    for name in ("traces", "svg"):
        try:
            if options[name]:
                Path(options[name]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"--{name} {options[name]}: the folder cannot be created: {error.strerror}")
    if problems:
        raise JobError(problems)


def _show_hang(folder: Path) -> None:
    report = {}
    for path in sorted(folder.glob(f"attempt_*/{WATCHDOG_REPORT}")):
        report = parse_json(read_bytes(path, MOST_BYTES))
    message = report.get("message", "") if isinstance(report, dict) else ""
    echo(json.dumps({"ok": False, "verdict": "FAILED: ranks hang", "failures": [message], "hang": report}, indent=1))


BOTH = {
    "device": Option("where to compute; auto takes the accelerator if there is one", "auto", DeviceName),
    "nproc_per_node": Option(
        "processes that measure together (default: 2 on a CPU; on accelerators 1 for compute, all for comm)",
        0,
        at_least=1,
    ),
    "threads": Option("CPU threads per process (default: the cores divided among the processes)", 0, at_least=1),
    "svg": Option("write a picture of the fit", value="FILE"),
    "out": Option("write the cluster to this file instead", value="FILE"),
}
SWITCHES = {
    "quick": "fewer sizes and repeats: seconds instead of minutes",
    **DARK,
    **JSON,
    "save": "write the cluster file (the default)",
    "no_save": "do not write the cluster file",
}
PRECISION = Option("precision of the matrix products and of attention", "fp32", Literal["fp32", "bf16", "fp16"])
CHOSEN = Option(
    "some of all_reduce, all_gather, reduce_scatter, all_to_all, send, with commas between (default: all)",
    value="NAMES",
)
BENCHES = {
    "compute": Command(
        options={"precision": PRECISION, **BOTH},
        switches=SWITCHES,
        about="one device: matrix products, attention, streams, tiny kernels",
    ),
    "comm": Command(
        options={"collectives": CHOSEN, **BOTH},
        switches=SWITCHES,
        about="collectives among processes, by group size and bytes",
    ),
}
BENCH = Verb(
    "bench",
    "Measures this machine and fits the cost model's cluster to it, so that cluster=local predicts on it.",
    BENCHES,
    (
        ("bench compute --precision bf16 --svg compute.svg", "one device, and a picture of the fit"),
        ("bench comm --nproc-per-node 4 --collectives all_reduce,send", "four processes"),
    ),
    (
        "Both add to one file, a job file with a cluster section: $PHALANX_HOME/cluster.yaml, or "
        "~/.config/phalanx/cluster.yaml. Under torchrun, srun or mpiexec, bench comm measures the ranks that were "
        "started, also between nodes.",
    ),
)
BENCH_STOPPED = "before everything was measured; nothing was written."
BUSY_LOAD = 0.5
"""Load average per core above which a warning reports other running programs: one process per two cores."""


@BENCH.starts
def bench(argv: Sequence[str]) -> int:
    if BENCH.answers_help(argv):
        return 0
    return run_on_ranks(partial(_bench_request, argv), partial(_start_bench, argv), _bench_rank, _timeout_s)


def _timeout_s(_: object) -> float:
    from phalanx.machine.calibration import TIMEOUT_S

    return TIMEOUT_S


@dataclass(frozen=True)
class _Request:
    words: Words
    path: Path | None
    """The file of the cluster; None with --no-save."""
    picture: OutputFiles


def _bench_request(argv: Sequence[str], ranks: Ranks | None) -> _Request:
    """Returns what is to be measured. Raises JobError, before anything is measured, also for files that cannot be read
    or written, collectives that there are not, and options of one launcher on ranks of another."""
    words, problems = BENCH.read(argv)
    if problems:
        raise JobError(problems)
    options = words.options
    if {"save", "no_save"} <= words.switches:
        raise JobError("--save and --no-save exclude each other")
    path = Path(options["out"]).expanduser() if options["out"] else default_path()
    request = _Request(words, None if "no_save" in words.switches else path, OutputFiles.of(words, "svg"))
    if request.path is not None:
        fields_of(request.path)
    if words.command == "comm":
        _collectives(options["collectives"])
    if options["device"] in DEVICE_WORDS:
        from phalanx.launch.accelerators import require

        require(options["device"], "--device")
    if ranks is not None and options["nproc_per_node"] not in (0, ranks.local_world):
        raise JobError(f"--nproc-per-node is for one launcher, and {ranks.source} has started {ranks.world} processes")
    return request


def fields_of(path: Path) -> dict[str, Any]:
    """Returns the fields of the file by dotted path; none where there is no file. Raises JobError for a file that is
    wrong, before anything is measured."""
    if not path.exists():
        return {}
    try:
        return local_fields(path)
    except JobError as error:
        raise JobError([*error.problems, f"correct or delete {path}, or write elsewhere: --out FILE"]) from None


def _start_bench(argv: Sequence[str], request: _Request) -> int:
    """Measures in this process, or starts processes that run the same command, each as a rank."""
    from phalanx.launch.accelerators import accelerators
    from phalanx.launch.local import launch_briefly

    options, is_comm = request.words.options, request.words.command == "comm"
    processes = options["nproc_per_node"]
    if not processes and (devices := accelerators(options["device"])[1]):
        processes = devices if is_comm else 1
    processes = processes or (2 if is_comm else min(2, len(os.sched_getaffinity(0))))
    if processes == 1:
        return _bench_rank(request, SINGLE)
    return launch_briefly(
        ["bench", *argv],
        processes=processes,
        threads=threads_for(options["threads"], processes),
        grace_s=5.0,
        stopped=BENCH_STOPPED,
        preload=["phalanx.cli.machine", "phalanx.machine.calibration"],
    )


def _bench_rank(request: _Request, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.machine.calibration import comm_report, compute_report
    from phalanx.train.device import choose

    words, options, quick = request.words, request.words.options, "quick" in request.words.switches
    device = choose(options["device"], ranks.local_rank)
    if ranks.rank == 0:
        say_how_busy()
    threads = threads_for(options["threads"], ranks.local_world or 1)
    if words.command == "comm":
        chosen = _collectives(options["collectives"])
        report = comm_report(ranks, device, threads, collectives=chosen, quick=quick, store=store)
    else:
        known, precision = fields_of(request.path) if request.path else {}, options["precision"]
        report = compute_report(ranks, device, threads, precision=precision, quick=quick, known=known, store=store)
    if ranks.rank == 0:
        _show_bench(report, request)
    return 0


def _collectives(text: str) -> Sequence[Any]:
    from phalanx.cost.fit import COLLECTIVES

    chosen = [name.strip().replace("-", "_") for name in text.split(",")] if text else COLLECTIVES
    for name in chosen:
        if name not in COLLECTIVES:
            meant = nearest(name, COLLECTIVES)
            hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(COLLECTIVES)}"
            raise JobError(f"--collectives: no collective {name!r}; {hint}")
    return chosen


def say_how_busy() -> None:
    """Warns on standard error where other programs keep the machine busy; rank 0 does so before it measures."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY_LOAD * cores:
        echo(
            f"phalanx: this machine is busy (load {load:.1f} on {cores} cores); measurements will be noisy",
            file=sys.stderr,
            wrap=True,
        )


def _show_bench(report: CalibrationReport, request: _Request) -> None:
    """Writes the files and prints the report; warns on standard error where predictions with it will be unreliable."""
    from phalanx.machine.calibration import of_device
    from phalanx.machine.calibration import write as write_cluster

    words, path = request.words, request.path
    if path is not None:
        known = of_device(fields_of(path), report.fields["device"], report.fields.get("accelerator.name", ""))
        # The words of the command that the figures depend on.
        changed = {
            name: words.options[name]
            for name, each in BENCHES[words.command].options.items()
            if words.options[name] != each.default
        }
        command = [f"{flag_of(name)} {value}" for name, value in changed.items() if name not in ("svg", "out")]
        command += ["--quick"] if "quick" in words.switches else []
        fact = f"{report.setting}, median error {report.error:.1%}: phalanx bench {' '.join([words.command, *command])}"
        write_cluster(path, {**known, **report.fields}, report.what, fact)
    request.picture.write({"svg": lambda: report.svg})
    if report.assessment.problem:
        echo(
            f"phalanx: unreliable ({report.assessment.problem}): {report.assessment.remedy}; predictions on "
            f"cluster=local {'are refused' if report.assessment.status == 'refused' else 'warn'} until then",
            file=sys.stderr,
            wrap=True,
        )
    if words.as_json:
        svg = words.options["svg"] or None
        echo(json.dumps({**report.as_dict(), "file": str(path) if path else None, "svg": svg}, indent=1))
        return
    echo(report.text(), wrap=True)
    for written in filter(None, (path, words.options["svg"])):
        echo(f"written: {written}")
    if path is not None and report.what == "compute" and "intra.gbs" not in fields_of(path):
        echo("next: phalanx bench comm", file=sys.stderr)
