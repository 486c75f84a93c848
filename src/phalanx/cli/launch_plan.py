"""Where a job is launched, and what starts it there. A program's launch (program.py) differs in some of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.blocks.parameters import count
from phalanx.check.load import as_yaml
from phalanx.cli.verb import Words
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.launch import start
from phalanx.launch.exported import Exported, exported
from phalanx.launch.grid import GridRequest, ProcessGrid, solve
from phalanx.launch.hosts import HostSlots, names_of, read_hosts
from phalanx.launch.site import GENERIC, Site, chosen
from phalanx.launch.submit import ManifestRequest, SubmitRequest, parse_time
from phalanx.units import counted

_DEVICES_S = 20.0
LARGE_PARAMETERS = 500_000_000
"""Parameters from which on nobody trains on the default corpus, or for the default number of steps, on purpose."""


@dataclass(frozen=True)
class LaunchPlan:
    """A job, where it is launched, and how many processes run where."""

    words: Words
    extra: tuple[str, ...]
    """The user's own options of the launcher, or the program."""
    place: start.LaunchPlace
    site: Site | None
    """The machine's settings; None on a machine of which nothing is known."""
    hosts: tuple[HostSlots, ...]
    devices: int
    """Accelerators of a node that are used; 0 on CPUs."""
    grid: ProcessGrid
    exported: Exported

    @classmethod
    def of(
        cls, words: Words, extra: tuple[str, ...], env: Mapping[str, str], which: Callable[[str], str | None], host: str
    ) -> LaunchPlan:
        """Returns the plan. Raises JobError if the numbers do not fit, and for every wrong option."""
        options = words.options
        place = start.where(env, which)
        site = chosen(options["site"], env, host)
        hosts = tuple(read_hosts(Path(options["hostfile"]))) if options["hostfile"] else place.hosts
        counts_here = place.is_allocation or (place.kind in ("host", "pod") and not options["submit"])
        devices = cls.used_devices(words, site, env, which if counts_here and not options["hostfile"] else None)
        whence = f"--hostfile {options['hostfile']}" if options["hostfile"] else "the allocation"
        grid = solve(cls.grid_request(words, len(hosts), whence, devices))
        variables = exported(env, options["export_env"], options["env"], site.environment if site else {})
        return cls(words, extra, place, site, hosts, devices, grid, variables)

    @property
    def ranks_by(self) -> start.RanksBy:
        return self.words.options.get("ranks_by", "phalanx")

    @property
    def grid_document(self) -> dict[str, Any]:
        grid = self.grid
        found = {"nnodes": grid.nnodes, "nproc_per_node": grid.per_node, "processes": grid.processes}
        return {**found, "layout": self.words.job.layout.line()}

    @property
    def notes(self) -> list[str]:
        found = [f"{self.site.name}: {self.site.note}"] if self.site and self.site.note else []
        if self.hosts and self.grid.nodes < len(self.hosts):
            found.append(f"uses {self.grid.nodes} of {len(self.hosts)} nodes")
        grid, devices = self.grid, self.devices
        small = [host for host in self.hosts[: grid.nodes] if host.slots is not None and host.slots < grid.per_node]
        if small:
            short = ", ".join(f"{host.name} {host.slots}" for host in small[:3]) + ", …" * (len(small) > 3)
            found.append(f"{grid.per_node} processes per node, and these hosts have fewer slots: {short}")
        if grid.per_node < devices:
            ranks = f"{counted(grid.processes, 'rank')} for {grid.nodes * devices} devices"
            found.append(f"uses {grid.per_node} of {devices} devices per node: {ranks}")
        return [*found, *self._left_at_default]

    @property
    def _left_at_default(self) -> Sequence[str]:
        """A warning for each field of a large model that is submitted with the default for a first try on a laptop, and
        the offer to rehearse it."""
        options = self.words.options
        if self.words.about_job is None or not options["submit"]:
            return []
        loaded, job = self.words.loaded, self.words.job
        if count(replace(job.model, vocab_size=job.model.vocab_size or 1)) < LARGE_PARAMETERS:
            return []
        offered = [] if "rehearse" in self.words.switches else ["--rehearse runs its fullest ranks here first"]
        left = {path: get(job, path) for path in ("data.corpus", "train.steps") if loaded.origins[path] == "default"}
        return [
            *(
                f"warning: {path} is not set: {job.model.preset or 'a large model'} trains on its default, {value}"
                for path, value in left.items()
            ),
            *offered,
        ]

    @staticmethod
    def used_devices(
        words: Words, site: Site | None, env: Mapping[str, str], which: Callable[[str], str | None] | None
    ) -> int:
        """Returns the accelerators of a node: by the site's file, Slurm's variables, or the driver's own list, if
        `which` says that this host is one of them. 0 if there are none, or if the job does not use them."""
        job = words.job
        if job.cluster.device == "cpu":
            return 0
        stated = job.cluster.devices_per_node if _wants_devices(job, site) else 0
        return LaunchPlan.devices_of_node(site, env, which, stated)

    @staticmethod
    def devices_of_node(
        site: Site | None, env: Mapping[str, str], which: Callable[[str], str | None] | None, stated: int = 0
    ) -> int:
        if site and site.devices:
            return site.devices
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
            if match := re.fullmatch(r"(?:[\w.-]+:)*([0-9]{1,4})", env.get(name, "")):
                return int(match[1])
        if stated:
            return stated
        program = which("nvidia-smi") if which else None
        if not program:
            return 0
        try:
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DEVICES_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())

    @staticmethod
    def grid_request(words: Words, available: int, where: str, devices: int) -> GridRequest:
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
            available=available,
            where=where,
            devices=devices,
            cpu=cluster.device == "cpu",
        )

    @property
    def what(self) -> str:
        return f"layout {self.words.job.layout.line()}"

    @property
    def node_words(self) -> tuple[str, ...]:
        switches = [f"--{name}" for name in ("fresh", "oversubscribe", "json") if name in self.words.switches]
        # The planner chooses an open layout for the devices of all nodes.
        job, nodes = self.words.job, self.grid.nodes
        planned = job.layout.auto and nodes > 1 and job.cluster.nodes != nodes
        return (*self.words.subjects, *([f"++cluster.nodes={nodes}"] if planned else []), *switches)

    @property
    def directory(self) -> Path:
        run = self.words.job.run
        return Path(os.path.abspath(Path(run.dir) / run.name))

    def words_inside(self, site: Site, time_s: int) -> tuple[list[str], list[str]]:
        options, signal_s = self.words.options, self.words.options["signal"]
        stated = self.words.loaded.origins["run.grace_s"] != "default"
        grace = [f"run.grace_s={max(10, signal_s - 10)}"] if signal_s and not stated else []
        more = [f"--ranks-by={self.ranks_by}"] if self.ranks_by != "phalanx" else []
        # PBS has no signal before the end of the time; Slurm sends it.
        stops = options["stop_after"] or (
            time_s - signal_s if signal_s and site.scheduler == "pbs" and self.ranks_by == "phalanx" else 0
        )
        more += [f"--stop-after={stops}"] if stops else []
        return [*self.words.subjects, *grace], more

    @cached_property
    def manifest_request(self) -> ManifestRequest:
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
            claim=options["bucket"] or claim,
            mount=mount or ManifestRequest.mount,
            namespace=options["namespace"],
            devices=self.grid.per_node if _wants_devices(job, None) else 0,
            shm_gib=options["shm_gib"],
            grace_s=job.run.grace_s,
            max_restarts=job.run.max_restarts,
            time_s=parse_time(options["time"]) if options["time"] else 0,
        )

    @property
    def settings(self) -> list[str]:
        return [f"{name}={shlex.quote(value)}" for name, value in sorted(self.exported.values.items())]

    def sentence(self, launcher: start.Launcher) -> str:
        grid, job = self.grid, f", job {self.place.job_id}" if self.place.job_id else ""
        nodes = f"{grid.nnodes} node{'' if grid.nnodes == '1' else 's'}"
        processes = f"{grid.per_node} process{'' if grid.per_node == 1 else 'es'} = {grid.processes}"
        return f"{start.IN_WORDS[self.place.kind]}{job}; {launcher}; {nodes} × {processes}; {self.what}"

    def start_request(self) -> start.StartRequest:
        options, grid = self.words.options, self.grid
        full = grid.per_node == (self.site.devices if self.site else 0)
        by_launcher = self.ranks_by == "launcher" and full and self.site is not None
        hosts = names_of(self.hosts)[: grid.nodes]
        return start.StartRequest(
            words=self.node_words,
            grid=grid,
            hosts=hosts,
            endpoint=self._endpoint(hosts) if grid.nodes > 1 else None,
            ranks_by=self.ranks_by,
            exported=self.exported,
            python=sys.executable,
            folder=os.getcwd(),
            job_id=self.place.job_id,
            cpu_bind=options["cpu_bind"] or (self.site.cpu_bind if by_launcher and self.site else ""),
            cpus_per_rank=self.site.cpus_per_rank if by_launcher and self.site else 0,
            devices=self.devices,
            in_step=self.place.in_step,
            stop_after_s=options.get("stop_after", 0),
            extra=self.extra if self.words.about_job else (),
            remote_shell=tuple(shlex.split(options["remote_shell"])),
            grace_s=self.words.job.run.grace_s if self.words.about_job else start.StartRequest.grace_s,
        )

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
        key = f"{self.place.job_id}.{self.place.restarts}" if self.place.job_id else str(self.directory)
        return first, self.words.options["port"] or start.port_for(key, start.ephemeral_ports())

    def submit_request(self) -> SubmitRequest:
        """Returns the request for a batch script. Raises JobError for a wrong time limit, and if the site needs an
        account."""
        options, switches = self.words.options, self.words.switches
        site, signal_s = self.site or GENERIC[options["submit"]], options.get("signal", 0)
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
        time_s = 0
        try:
            time_s = parse_time(options["time"] or site.time)
        except JobError as error:
            problems += error.problems
        if time_s and signal_s >= time_s:
            problems.append(f"--signal {signal_s} s is not less than the time limit of {time_s} s")
        if "dry_run" not in switches:  # whose text may be for another machine
            if self.words.about_job:
                from phalanx.data.prepare import absent  # numpy: for this alone

                problems += absent(self.words.job.data)
            program = "sbatch" if site.scheduler == "slurm" else "qsub"
            if problems and not shutil.which(program):
                problems.append(f"{program} is not installed here, which submits the job: --dry-run prints the text")
        if problems:
            raise JobError(problems)
        before, after = self.words_inside(site, time_s)
        found = [f"--nnodes={self.grid.nnodes}", f"--nproc-per-node={self.grid.per_node}"]
        found += [f"--site={os.path.abspath(options['site']) if options['site'].endswith('ml') else site.name}"]
        for name in ("launcher", "cpu_bind", "port"):
            found += [f"--{name.replace('_', '-')}={options[name]}"] if options[name] else []
        found += [f"--export-env={name}" for name in self.exported.secrets]
        return SubmitRequest(
            name=self.directory.name,
            words=(*before, *found, *after, *(["--", *self.extra] if self.extra else [])),
            python=sys.executable,
            folder=os.getcwd(),
            directory=self.directory,
            grid=self.grid,
            ranks_by=self.ranks_by,
            site=site,
            exported=self.exported,
            time_s=time_s,
            signal_s=signal_s,
            requeue="requeue" in switches,
            account=options["account"],
            queue=options["queue"],
            options=options["batch_option"],
            devices=self.devices if site.scheduler == "slurm" else 0,
        )


_LOCAL_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Variables that name folders of this machine, which an image does not have."""


def _wants_devices(job: Job, site: Site | None) -> bool:
    if job.cluster.device != "auto":
        return job.cluster.device != "cpu"
    return bool(job.cluster.accelerator.name) or bool(site and site.devices)
