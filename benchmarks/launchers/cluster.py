"""A real Slurm cluster of two nodes on one machine: a slurmd in each of two network namespaces, slurmctld in the first.

Key, sockets, state and logs are in one folder; nothing in /etc is read or written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.nodes import Nodes

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "salloc", "scontrol")
_START_S = 30.0
_DEAD_S = 120.0
_CONF = """
ClusterName=two
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MailProg={true}
{nodes}
PartitionName=two Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster whose nodes are two network namespaces. A context manager: needs root and Slurm's daemons.

    Raises TimeoutError if a daemon does not come up."""

    def __init__(self, nodes: Nodes, folder: Path):
        self.nodes, self.folder = nodes, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        self.folder.mkdir(mode=0o711, parents=True)
        for name in ("state", *(f"spool-{host}" for host in self.nodes.hosts)):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        hosts = zip(self.nodes.hosts, self.nodes.addresses, strict=True)
        lines = [
            f"NodeName={host} NodeHostname={host} NodeAddr={address} CPUs=4 RealMemory=2000 State=UNKNOWN"
            for host, address in hosts
        ]
        text = _CONF.format(
            first=self.nodes.hosts[0],
            address=self.nodes.addresses[0],
            folder=self.folder,
            true=shutil.which("true"),
            nodes="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        try:
            files = {
                "key-file": "munge.key",
                "socket": "munge.sock",
                "pid-file": "munged.pid",
                "log-file": "munged.log",
            }
            munged = [f"--{option}={self.folder / name}" for option, name in files.items()]
            self._run(0, "munged", "--force", f"--seed-file={self.folder / 'munge.seed'}", *munged)
            self._run(0, "slurmctld")
            _wait_for(lambda: self.call("scontrol", "ping").returncode == 0, _START_S, "slurmctld does not answer")
            for node in (0, 1):
                self.heal(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, subprocess.SubprocessError):
            self.call("scancel", "--quiet", "--user=root")
            _wait_for(lambda: not self.call("squeue", "--noheader").stdout.strip(), 15, "jobs are left")
        for name in (*(f"slurmd-{host}" for host in self.nodes.hosts), "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)
        for host in self.nodes.hosts:
            self._kill_steps(host)

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm on the first node."""
        return subprocess.run(
            [*self.nodes.prefix(0), *argv],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def fail(self, node: int) -> None:
        """A node dies: its slurmd, its steps and their tasks, by SIGKILL."""
        self._end(f"slurmd-{self.nodes.hosts[node]}", signal.SIGKILL)
        self._kill_steps(self.nodes.hosts[node])

    def heal(self, node: int) -> None:
        """A node comes up, or back."""
        host = self.nodes.hosts[node]
        self._run(node, "slurmd", "-N", host)
        _wait_for(lambda: self._state(host) in ("idle", "mix", "alloc"), _DEAD_S, f"{host} does not come up")

    def wait_down(self, node: int) -> None:
        """Waits until slurmctld has seen that a node is dead."""
        host = self.nodes.hosts[node]
        _wait_for(lambda: self._state(host).startswith("down"), _DEAD_S, f"slurmctld does not see that {host} is dead")

    def _state(self, host: str) -> str:
        return self.call("sinfo", "--noheader", f"--nodes={host}", "--format=%t").stdout.strip()

    def _run(self, node: int, *argv: str) -> None:
        # `ip netns exec` hides /sys/fs/cgroup, which slurmd asks for. The file does not keep our pipes open.
        enter = ["nsenter", f"--net=/run/netns/{self.nodes.names[node]}", *self.nodes.prefix(node)[4:]]
        with (self.folder / "daemons.log").open("ab") as log:
            subprocess.run(
                [*enter, *argv],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_START_S,
                check=True,
            )

    def _end(self, name: str, number: int) -> None:
        file = self.folder / f"{name}.pid"
        with suppress(OSError, ValueError):
            pid = int(file.read_text())
            if Path(f"/proc/{pid}/comm").read_text().strip() == name.partition("-")[0]:
                os.kill(pid, number)
                _wait_for(lambda: not Path(f"/proc/{pid}").exists(), 10, f"{name} does not end")

    def _kill_steps(self, host: str) -> None:
        """Kills the tasks of a node, and the processes of Slurm that look after them."""
        pids = tasks(self.env["SLURM_CONF"], host)
        parents = {pid for task in pids if (pid := _parent(task)) and _name(pid) == "slurmstepd"}
        for pid in [*parents, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def tasks(conf: str, host: str) -> list[int]:
    """Returns the processes that run in steps of a node of the cluster of a configuration file."""
    wanted = {f"SLURM_CONF={conf}".encode(), f"SLURMD_NODENAME={host}".encode()}
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
    return found


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def missing() -> Sequence[str]:
    """Returns the programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def _wait_for(condition: Callable[[], object], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} within {seconds:g} s")
        time.sleep(0.2)
