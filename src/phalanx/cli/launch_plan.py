"""What `phalanx launch` has found out: place, site, grid, variables, and the requests that follow from them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.blocks.parameters import count
from phalanx.check.load import as_yaml
from phalanx.cli.job_words import JobWords
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.launch.exported import Exported, exported
from phalanx.launch.grid import GridRequest, ProcessGrid, solve
from phalanx.launch.hosts import HostSlots, names_of, read_hosts
from phalanx.launch.sites.load import chosen
from phalanx.launch.sites.site import GENERIC, Site
from phalanx.launch.start.command import Launcher, StartRequest, ephemeral_ports, port_for
from phalanx.launch.submit.kubernetes import ManifestRequest
from phalanx.launch.submit.script import SubmitRequest, parse_time
from phalanx.launch.where import IN_WORDS, LaunchPlace, where

_DEVICES_S = 20.0
LARGE_PARAMETERS = 500_000_000
"""Parameters from which on nobody trains on the default corpus, or for the default number of steps, on purpose."""


@dataclass(frozen=True)
class LaunchPlan:
    """A job, where it is launched, and how many processes run where."""

    words: JobWords
    extra: tuple[str, ...]
    """The user's own options of the launcher."""
    place: LaunchPlace
    site: Site | None
    """The machine's settings; None on a machine of which nothing is known."""
    hosts: tuple[HostSlots, ...]
    devices: int
    """Accelerators of a node that the job uses; 0 on CPUs."""
    grid: ProcessGrid
    exported: Exported

    @classmethod
    def of(
        cls,
        words: JobWords,
        extra: tuple[str, ...],
        env: Mapping[str, str],
        which: Callable[[str], str | None],
        host: str,
    ) -> LaunchPlan:
        """Returns the plan. Raises JobError if the numbers do not fit, and for every wrong option."""
        options = words.options
        place = where(env, which)
        site = chosen(options["site"], env, host)
        hosts = tuple(read_hosts(Path(options["hostfile"]))) if options["hostfile"] else place.hosts
        counts_here = place.is_allocation or (place.kind in ("host", "pod") and not options["submit"])
        devices = _devices(words.job, site, env, which if counts_here and not options["hostfile"] else None)
        grid = solve(_grid_request(words, place, hosts, devices))
        variables = exported(env, options["export_env"], options["env"], site.environment if site else {})
        return cls(words, extra, place, site, hosts, devices, grid, variables)

    @property
    def notes(self) -> list[str]:
        """Notes for the user, printed before the job starts."""
        found = [f"{self.site.name}: {self.site.note}"] if self.site and self.site.note else []
        if self.hosts and self.grid.nodes < len(self.hosts):
            found.append(f"uses {self.grid.nodes} of {len(self.hosts)} nodes")
        grid, there = self.grid, self.grid.nodes * self.devices
        if grid.per_node < self.devices:
            found.append(
                f"uses {grid.per_node} of {self.devices} devices per node: the layout has {grid.processes} processes, "
                f"{grid.nnodes} node{'' if grid.nnodes == '1' else 's'} {there} devices"
            )
        return [*found, *self._left_at_default]

    @property
    def _left_at_default(self) -> list[str]:
        """A warning for each field of a large model that is submitted with the default for a first try on a laptop."""
        loaded = self.words.loaded
        job, options = loaded.job, self.words.options
        if not options["submit"] or count(replace(job.model, vocab_size=job.model.vocab_size or 1)) < LARGE_PARAMETERS:
            return []
        left = {path: get(job, path) for path in ("data.corpus", "train.steps") if loaded.origins[path] == "default"}
        return [
            f"warning: {path} is not set: {job.model.preset or 'a large model'} trains on its default, {value}"
            for path, value in left.items()
        ]

    @property
    def grid_document(self) -> dict[str, Any]:
        """The numbers for JSON."""
        return {
            "nnodes": self.grid.nnodes,
            "nproc_per_node": self.grid.per_node,
            "processes": self.grid.processes,
            "layout": self.words.job.layout.line(),
        }

    @property
    def settings(self) -> list[str]:
        """The variables as words of a shell's export."""
        return [f"{name}={shlex.quote(value)}" for name, value in sorted(self.exported.values.items())]

    def sentence(self, launcher: Launcher) -> str:
        """Returns the plan in one line."""
        grid, job = self.grid, f", job {self.place.job_id}" if self.place.job_id else ""
        nodes = f"{grid.nnodes} node{'' if grid.nnodes == '1' else 's'}"
        processes = f"{grid.per_node} process{'' if grid.per_node == 1 else 'es'} = {grid.processes}"
        layout = self.words.job.layout.line()
        return f"{IN_WORDS[self.place.kind]}{job}; {launcher}; {nodes} × {processes}; layout {layout}"

    def start_request(self, launcher: Launcher) -> StartRequest:
        """Returns the request for a launcher's commands."""
        options, job, grid = self.words.options, self.words.job, self.grid
        full = grid.per_node == (self.site.devices if self.site else 0)
        by_launcher = options["ranks_by"] == "launcher" and full and self.site is not None
        hosts = names_of(self.hosts)[: grid.nodes]
        return StartRequest(
            words=self._job_words(),
            grid=grid,
            hosts=hosts,
            endpoint=self._endpoint(hosts) if grid.nodes > 1 else None,
            ranks_by=options["ranks_by"],
            exported=self.exported,
            python=sys.executable,
            folder=os.getcwd(),
            job_id=self.place.job_id,
            cpu_bind=options["cpu_bind"] or (self.site.cpu_bind if by_launcher and self.site else ""),
            cpus_per_rank=self.site.cpus_per_rank if by_launcher and self.site else 0,
            devices=self.devices,
            in_step=self.place.in_step,
            stop_after_s=options["stop_after"],
            extra=self.extra,
            remote_shell=tuple(shlex.split(options["remote_shell"])),
            grace_s=job.run.grace_s,
        )

    def _job_words(self) -> tuple[str, ...]:
        switches = [f"--{name}" for name in ("fresh", "oversubscribe", "json") if name in self.words.switches]
        # The planner chooses an open layout for the devices of all nodes.
        job, nodes = self.words.job, self.grid.nodes
        planned = job.layout.auto and nodes > 1 and job.cluster.nodes != nodes
        return (*self.words.given, *([f"++cluster.nodes={nodes}"] if planned else []), *switches)

    def _endpoint(self, hosts: tuple[str, ...]) -> tuple[str, int]:
        if not hosts:
            if self.words.options["launcher"] in (None, "local"):
                return "", 0
            raise JobError(
                "no list of nodes is known here, so that their meeting place is not: call this inside the allocation, "
                "or give --hostfile FILE"
            )
        suffix = self.site.host_suffix if self.site else ""
        first = hosts[0] if not suffix or hosts[0].endswith(suffix) else hosts[0].partition(".")[0] + suffix
        key = f"{self.place.job_id}.{self.place.restarts}" if self.place.job_id else str(self._directory)
        return first, self.words.options["port"] or port_for(key, ephemeral_ports())

    @property
    def _directory(self) -> Path:
        run = self.words.job.run
        return Path(os.path.abspath(Path(run.dir) / run.name))

    @cached_property
    def submit_request(self) -> SubmitRequest:
        """The request for a batch script. Raises JobError for a wrong time limit, and if the site needs an account."""
        options, job = self.words.options, self.words.job
        site = self.site or GENERIC[options["submit"]]
        problems = []
        if site.scheduler != options["submit"]:
            problems.append(f"--submit {options['submit']}: {site.name} has {site.scheduler}")
        if site.account_required and not options["account"]:
            problems.append(f"--account is missing: {site.name} charges every job to a project")
        problems += [
            f"--batch-option {option[:80]!r}: expected an option, such as --batch-option=--exclusive"
            for option in options["batch_option"]
            if not option.isprintable() or not option.startswith("-")
        ]
        time_s, signal_s = 0, options["signal"]
        try:
            time_s = parse_time(options["time"] or site.time)
        except JobError as error:
            problems += error.problems
        if time_s and signal_s >= time_s:
            problems.append(f"--signal {signal_s} s is not less than the time limit of {time_s} s")
        program = "sbatch" if site.scheduler == "slurm" else "qsub"
        if "dry_run" not in self.words.switches:  # whose text may be for another machine
            from phalanx.data.prepare import absent  # numpy: for this alone

            problems += absent(job.data)
        if problems and "dry_run" not in self.words.switches and not shutil.which(program):
            problems.append(f"{program} is not installed here, which submits the job: --dry-run prints the text")
        if problems:
            raise JobError(problems)
        stated = self.words.loaded.origins["run.grace_s"] != "default"
        grace = [f"run.grace_s={max(10, signal_s - 10)}"] if signal_s and not stated else []
        return SubmitRequest(
            name=job.run.name,
            words=(*self.words.given, *grace, *self._launch_words(site, time_s, signal_s)),
            python=sys.executable,
            folder=os.getcwd(),
            directory=self._directory,
            grid=self.grid,
            ranks_by=options["ranks_by"],
            site=site,
            exported=self.exported,
            time_s=time_s,
            signal_s=signal_s,
            requeue="requeue" in self.words.switches,
            account=options["account"],
            queue=options["queue"],
            options=options["batch_option"],
            devices=self.devices if site.scheduler == "slurm" else 0,
        )

    def _launch_words(self, site: Site, time_s: int, signal_s: int) -> list[str]:
        """Returns the options of the launch inside the job."""
        options = self.words.options
        found = [f"--nnodes={self.grid.nnodes}", f"--nproc-per-node={self.grid.per_node}"]
        found += [f"--site={os.path.abspath(options['site']) if options['site'].endswith('ml') else site.name}"]
        for name in ("launcher", "cpu_bind", "port"):
            found += [f"--{name.replace('_', '-')}={options[name]}"] if options[name] else []
        found += [f"--ranks-by={options['ranks_by']}"] if options["ranks_by"] != "phalanx" else []
        # PBS has no signal before the end of the time; Slurm sends it.
        stops = options["stop_after"] or (
            time_s - signal_s if signal_s and site.scheduler == "pbs" and options["ranks_by"] == "phalanx" else 0
        )
        found += [f"--stop-after={stops}"] if stops else []
        found += [f"--export-env={name}" for name in self.exported.secrets]
        return [*found, "--", *self.extra] if self.extra else found

    @cached_property
    def manifest_request(self) -> ManifestRequest:
        """The request for a manifest of Kubernetes."""
        options, job = self.words.options, self.words.job
        claim, _, mount = options["pvc"].partition(":")
        return ManifestRequest(
            name=job.run.name,
            job_yaml=as_yaml(self.words.loaded),
            grid=self.grid,
            values={name: value for name, value in self.exported.values.items() if name not in _LOCAL_PATHS},
            secrets=self.exported.secrets,
            secret=options["secret"],
            image=options["image"],
            claim=claim,
            mount=mount or ManifestRequest.mount,
            namespace=options["namespace"],
            devices=self.grid.per_node if _wants_devices(job, None) else 0,
            shm_gib=options["shm_gib"],
            grace_s=job.run.grace_s,
            max_restarts=job.run.max_restarts,
            time_s=parse_time(options["time"]) if options["time"] else 0,
        )


_LOCAL_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Variables that name folders of this machine, which an image does not have."""


def _grid_request(words: JobWords, place: LaunchPlace, hosts: tuple[HostSlots, ...], devices: int) -> GridRequest:
    options, job = words.options, words.job
    layout, cluster, run = job.layout, job.cluster, job.run
    stated = cluster.nodes if cluster.nodes > 1 or cluster.devices_per_node else 0
    return GridRequest(
        nnodes=options["nnodes"] or run.nnodes,
        per_node=options["nproc_per_node"],
        processes=options["nproc"],
        layout=0 if layout.auto else layout.processes,
        layout_words=layout.line(),
        cluster_nodes=stated,
        available=len(hosts),
        where=f"--hostfile {options['hostfile']}" if options["hostfile"] else "the allocation",
        devices=devices,
        cpu=cluster.device == "cpu",
    )


def _wants_devices(job: Job, site: Site | None) -> bool:
    if job.cluster.device != "auto":
        return job.cluster.device == "cuda"
    return bool(job.cluster.accelerator.name) or bool(site and site.devices)


def _devices(job: Job, site: Site | None, env: Mapping[str, str], which: Callable[[str], str | None] | None) -> int:
    """Returns the accelerators of a node: by the site's file, Slurm's variables, or the driver's own list, if `which`
    says that this host is one of them. 0 if there are none, or if the job does not use them."""
    if job.cluster.device == "cpu":
        return 0
    if site and site.devices:
        return site.devices
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if match := re.fullmatch(r"(?:[\w.-]+:)*([0-9]{1,4})", env.get(name, "")):
            return int(match[1])
    if _wants_devices(job, site) and job.cluster.devices_per_node:
        return job.cluster.devices_per_node
    program = which("nvidia-smi") if which else None
    if not program:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DEVICES_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
