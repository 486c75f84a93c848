"""`phalanx bench compute | comm`: measures this machine, for `cluster=local`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.option import Option, flag_of
from phalanx.cli.rank import run_on_ranks
from phalanx.cli.verb import JSON, Command, Verb, Words
from phalanx.config.clusters import default_path
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.launch.ranks import SINGLE, Ranks
from phalanx.nearest import nearest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.machine.calibration import CalibrationReport

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
VERB = Verb(
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


@VERB.starts
def run(argv: Sequence[str]) -> int:
    if VERB.answers_help(argv):
        return 0
    return run_on_ranks(partial(_parse, argv), partial(_start, argv), _be_a_rank, _timeout_s)


def _timeout_s(_: object) -> float:
    from phalanx.machine.calibration import TIMEOUT_S

    return TIMEOUT_S


@dataclass(frozen=True)
class _Request:
    """What is to be measured, and the files to write."""

    words: Words
    path: Path | None
    """The file of the cluster; None with --no-save."""
    picture: OutputFiles


def _parse(argv: Sequence[str], ranks: Ranks | None) -> _Request:
    """Returns what is to be measured. Raises JobError, before anything is measured, also for files that cannot be read
    or written, collectives that there are not, and options of one launcher on ranks of another."""
    words, problems = VERB.read(argv)
    if problems:
        raise JobError(problems)
    options = words.options
    if {"save", "no_save"} <= words.switches:
        raise JobError("--save and --no-save exclude each other")
    path = Path(options["out"]).expanduser() if options["out"] else default_path()
    request = _Request(words, None if "no_save" in words.switches else path, OutputFiles.of(words, "svg"))
    from phalanx.machine.calibration import fields_of

    if request.path is not None:
        fields_of(request.path)
    if words.command == "comm":
        _collectives(options["collectives"])
    if options["device"] == "cuda":
        import torch

        if not torch.cuda.device_count():
            raise JobError("--device cuda: this machine has no CUDA devices; --device cpu measures its processor")
    if ranks is not None and options["nproc_per_node"] not in (0, ranks.local_world):
        raise JobError(f"--nproc-per-node is for one launcher, and {ranks.source} has started {ranks.world} processes")
    return request


def _start(argv: Sequence[str], request: _Request) -> int:
    """Measures in this process, or starts processes that run the same command, each as a rank."""
    import torch

    from phalanx.launch.local import launch_briefly
    from phalanx.train.device import choose, threads_for

    options, is_comm = request.words.options, request.words.command == "comm"
    processes = options["nproc_per_node"]
    if not processes and choose(options["device"], 0).type == "cuda":
        processes = torch.cuda.device_count() if is_comm else 1
    processes = processes or (2 if is_comm else min(2, len(os.sched_getaffinity(0))))
    if processes == 1:
        return _be_a_rank(request, SINGLE)
    threads = threads_for(options["threads"], processes)
    return launch_briefly(["bench", *argv], processes=processes, threads=threads, grace_s=5.0, stopped=STOPPED)


def _be_a_rank(request: _Request, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.machine.calibration import comm_report, compute_report, fields_of
    from phalanx.train.device import choose, threads_for

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
        _show(report, request)
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


def _show(report: CalibrationReport, request: _Request) -> None:
    """Writes the files and prints the report; warns on standard error where predictions with it will be unreliable."""
    from phalanx.machine.calibration import fields_of, of_device
    from phalanx.machine.calibration import write as write_cluster

    words, path = request.words, request.path
    if path is not None:
        known = of_device(fields_of(path), report.fields["device"], report.fields.get("accelerator.name", ""))
        # The words of the command that the figures depend on.
        changed = {
            name: words.options[name]
            for name, each in COMMANDS[words.command].options.items()
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
