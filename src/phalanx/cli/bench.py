"""`phalanx bench compute | comm`: measures this machine, for `cluster=local`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.commands import JSON, Command, CommandVerb
from phalanx.cli.files import DARK, wants_dark, write
from phalanx.cli.option import Option
from phalanx.cli.options import as_foreign_rank
from phalanx.cli.page import flag_of
from phalanx.config.clusters import default_path
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.launch.environment import LOG_DIR
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.meet.detected import detected
from phalanx.launch.ranks import SINGLE, Ranks
from phalanx.nearest import nearest

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.calibrate.report import CalibrationReport

BOTH = {
    "device": Option(
        Literal["auto", "cpu", "cuda"], "auto", "where to compute; auto takes the accelerator if there is one"
    ),
    "nproc_per_node": Option(
        int,
        0,
        "processes that measure together (default: 2 on a CPU; on accelerators 1 for compute, all for comm)",
        at_least=1,
    ),
    "threads": Option(int, 0, "CPU threads per process (default: the cores divided among the processes)", at_least=1),
    "svg": Option(str, "", "write a picture of the fit", value="FILE"),
    "out": Option(str, "", "write the cluster to this file instead", value="FILE"),
}
SWITCHES = {
    "quick": "fewer sizes and repeats: seconds instead of minutes",
    **DARK,
    **JSON,
    "save": "write the cluster file (the default)",
    "no_save": "do not write the cluster file",
}
PRECISION = Option(Literal["fp32", "bf16", "fp16"], "fp32", "precision of the matrix products and of attention")
CHOSEN = Option(
    str,
    "",
    "some of all_reduce, all_gather, reduce_scatter, all_to_all, send, with commas between (default: all)",
    value="NAMES",
)
COMMANDS = {
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
VERB = CommandVerb(
    "bench",
    "Measures this machine and fits the cost model's cluster to it, so that cluster=local predicts on it.",
    COMMANDS,
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
STOPPED = "before everything was measured; nothing was written."
BUSY_LOAD = 0.5
"""Load average per core above which a warning reports other running programs: one process per two cores."""


def run(argv: Sequence[str]) -> int:
    if VERB.answers_help(argv):
        return 0
    die_with_launcher()
    ranks = detected(os.environ)
    if ranks is not None and LOG_DIR not in os.environ:
        from phalanx.calibrate.run import TIMEOUT_S

        return as_foreign_rank(ranks, lambda: _parse(argv), _be_a_foreign_rank, lambda _: TIMEOUT_S)
    request = _parse(argv)
    # Imported here, because it imports torch, which --help and errors do not need.
    from phalanx.train.device import choose, threads_for

    _refuse_device(request.options["device"])
    if ranks is None:
        processes = request.options["nproc_per_node"] or _processes(
            request.command, choose(request.options["device"], 0)
        )
        if processes > 1:
            return _launch(["bench", *argv], processes, threads_for(request.options["threads"], processes))
        ranks = SINGLE
    return _be_a_rank(request, ranks)


@dataclass(frozen=True)
class _Request:
    """The words of a command, with the defaults of its options."""

    command: str
    options: dict[str, Any]
    switches: frozenset[str]
    path: Path | None
    """The file to write; None with --no-save."""


def _parse(argv: Sequence[str]) -> _Request:
    """Returns what is to be measured. Raises JobError, before anything is measured, also for files that cannot be read
    or written."""
    words, problems = VERB.read(argv)
    if problems:
        raise JobError(problems)
    options = {name: option.default for name, option in COMMANDS[words.command].options.items()} | words.options
    if {"save", "no_save"} <= words.switches:
        raise JobError("--save and --no-save exclude each other")
    wants_dark(words.switches, options, "svg")
    path = Path(options["out"]).expanduser() if options["out"] else default_path()
    request = _Request(words.command, options, words.switches, None if "no_save" in words.switches else path)
    _refuse_early(options, request.command, request.path)
    return request


def _be_a_foreign_rank(request: _Request, ranks: Ranks, store: Store | None) -> int:
    """Measures as one of the processes that another launcher started. Raises JobError for options of one launcher."""
    _refuse_device(request.options["device"])
    if request.options["nproc_per_node"] not in (0, ranks.local_world):
        raise JobError(f"--nproc-per-node is for one launcher, and {ranks.source} has started {ranks.world} processes")
    return _be_a_rank(request, ranks, store)


def _be_a_rank(request: _Request, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.train.device import choose

    device = choose(request.options["device"], ranks.local_rank)
    if ranks.rank == 0:
        say_how_busy()
    report = _measure(request, ranks, device, store)
    if ranks.rank == 0:
        command = [request.command, *_measuring(request.command, request.options, request.switches)]
        _show(report, request.path, command, request.options["svg"], request.switches)
    return 0


def _refuse_early(options: dict[str, Any], command: str, path: Path | None) -> None:
    """Raises JobError, before anything is measured, for files that cannot be read or written, and collectives."""
    from phalanx.calibrate.cluster_file import fields_of

    if path is not None:
        fields_of(path)
    folder = Path(options["svg"]).expanduser().absolute().parent
    if options["svg"] and not os.path.isdir(folder):
        raise JobError(f"--svg: cannot write {options['svg']}: folder {folder} does not exist")
    if command == "comm":
        _collectives(options["collectives"])


def _collectives(text: str) -> Sequence[Any]:
    from phalanx.cost.fit import COLLECTIVES

    chosen = [name.strip().replace("-", "_") for name in text.split(",")] if text else COLLECTIVES
    for name in chosen:
        if name not in COLLECTIVES:
            meant = nearest(name, COLLECTIVES)
            hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(COLLECTIVES)}"
            raise JobError(f"--collectives: no collective {name!r}; {hint}")
    return chosen


def _refuse_device(wanted: str) -> None:
    import torch

    if wanted == "cuda" and not torch.cuda.device_count():
        raise JobError("--device cuda: this machine has no CUDA devices; --device cpu measures its processor")


def _processes(command: str, device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.device_count() if command == "comm" else 1
    return 2 if command == "comm" else min(2, len(os.sched_getaffinity(0)))


def _launch(argv: list[str], processes: int, threads: int) -> int:
    """Starts processes that run the same command, each as a rank. Their logs are kept only if one of them failed."""
    from phalanx.launch.local import launch_local

    logs = Path(tempfile.mkdtemp(prefix="phalanx_bench_"))
    code = launch_local(
        argv, processes=processes, log_dir=logs, threads=threads, all_ranks=False, grace_s=5.0, stopped=STOPPED
    )
    if code == 0:
        shutil.rmtree(logs)
    return code


def _measure(request: _Request, ranks: Ranks, device: torch.device, store: Store | None) -> CalibrationReport:
    from phalanx.calibrate import cluster_file, run
    from phalanx.train.device import threads_for

    options, quick = request.options, "quick" in request.switches
    threads = threads_for(options["threads"], ranks.local_world or 1)
    if request.command == "comm":
        chosen = _collectives(options["collectives"])
        return run.comm_report(ranks, device, threads, collectives=chosen, quick=quick, store=store)
    known = cluster_file.fields_of(request.path) if request.path else {}
    precision = options["precision"]
    return run.compute_report(ranks, device, threads, precision=precision, quick=quick, known=known, store=store)


def say_how_busy() -> None:
    """Warns on standard error where other programs keep the machine busy; rank 0 does so before it measures."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY_LOAD * cores:
        echo(
            f"phalanx: this machine is busy (load {load:.1f} on {cores} cores); measurements will be noisy",
            file=sys.stderr,
            wrap=True,
        )


def _measuring(command: str, options: dict[str, Any], switches: Collection[str]) -> list[str]:
    """Returns the words of the command that the figures depend on, without file names."""
    given = {name: value for name, value in options.items() if value != COMMANDS[command].options[name].default}
    words = [f"{flag_of(name)} {value}" for name, value in given.items() if name not in ("svg", "out")]
    return [*words, *(["--quick"] if "quick" in switches else [])]


def _show(
    report: CalibrationReport, path: Path | None, command: Sequence[str], svg: str, switches: Collection[str]
) -> None:
    """Writes the files and prints the report; warns on standard error where predictions with it will be unreliable."""
    from phalanx.calibrate import cluster_file

    if path is not None:
        known = cluster_file.of_device(
            cluster_file.fields_of(path), report.fields["device"], report.fields.get("accelerator.name", "")
        )
        fact = f"{report.setting}, median error {report.error:.1%}: phalanx bench {' '.join(command)}"
        cluster_file.write(path, {**known, **report.fields}, report.what, fact)
    if svg:
        write(str(Path(svg).expanduser()), report.svg, "dark" in switches)
    if report.assessment.problem:
        echo(
            f"phalanx: unreliable ({report.assessment.problem}): {report.assessment.remedy}; predictions on "
            f"cluster=local {'are refused' if report.assessment.status == 'refused' else 'warn'} until then",
            file=sys.stderr,
            wrap=True,
        )
    if "json" in switches:
        echo(json.dumps({**report.as_dict(), "file": str(path) if path else None, "svg": svg or None}, indent=1))
        return
    echo(report.text(), wrap=True)
    for written in filter(None, (path, svg)):
        echo(f"written: {written}")
    if path is not None and report.what == "compute" and "intra.gbs" not in cluster_file.fields_of(path):
        echo("next: phalanx bench comm", file=sys.stderr)
