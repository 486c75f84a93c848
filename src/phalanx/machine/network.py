"""Checks of the allocation and of the launcher's variables, and of names, interfaces and ports: where gloo and NCCL
connect, and whether this machine reaches itself there.
"""

from __future__ import annotations

import errno
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.errors import JobError
from phalanx.launch.hosts import expand, interface_towards, interfaces, names_of, read_hosts
from phalanx.launch.local import grace_left
from phalanx.launch.ranks import HEARTBEATS, LAUNCHER_PID, LOG_DIR, STORE, detect
from phalanx.machine.checks import CheckedMachine, CheckResult, Problems, check, error, ok, warn
from phalanx.units import counted, listed, seconds

_ENDS_SOON_S = 600.0
_SHOWN_HOSTS = 8
_SUBMITTERS = {"sbatch": "Slurm", "qsub": "PBS", "bsub": "LSF"}
_OWN = (LAUNCHER_PID, LOG_DIR, STORE, HEARTBEATS)


@check("launch", "scheduler")
def scheduler(machine: CheckedMachine, now: float | None = None) -> Problems:
    """Yields the allocation in which this process is; `now` in seconds since the epoch, another one in tests."""
    env = machine.env
    if "SLURM_JOB_ID" in env:
        yield from _slurm(machine, time.time() if now is None else now)
    elif "PBS_JOBID" in env:
        text, file = f"PBS job {env['PBS_JOBID']}", env.get("PBS_NODEFILE", "")
        try:
            nodes = names_of(read_hosts(Path(file))) if file else ()
        except JobError as problem:
            yield warn(
                f"{text}; its node file, PBS_NODEFILE, is of no use: {problem.problems[0]}",
                "run this on the first node of the allocation, or unset the variables of an old job",
            )
            return
        shown = f"{text}, {counted(len(nodes), 'node')}: {listed(nodes, _SHOWN_HOSTS)}"
        yield ok(shown if nodes else f"{text}; no node file")
    elif "LSB_JOBID" in env:
        hosts = dict.fromkeys(env.get("LSB_HOSTS", "").split())
        yield ok(f"LSF job {env['LSB_JOBID']}" + (f" on {listed(list(hosts), _SHOWN_HOSTS)}" if hosts else ""))
    elif "FLUX_JOB_ID" in env:
        yield ok(f"Flux job {env['FLUX_JOB_ID']}")
    elif "KUBERNETES_SERVICE_HOST" in env:
        index = env.get("JOB_COMPLETION_INDEX")
        yield ok("a Kubernetes pod" + (f", index {index} of an Indexed Job" if index else ""))
    else:
        path = env.get("PATH", "")
        submits = next((name for name in _SUBMITTERS if shutil.which(name, path=path)), None)
        where = f"; {submits} is installed: a login node of {_SUBMITTERS[submits]}" if submits else ""
        yield ok(f"no allocation{where}")


def _slurm(machine: CheckedMachine, now: float) -> Iterator[CheckResult]:
    env = machine.env
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    text = f"Slurm job {env['SLURM_JOB_ID']}, {nodes} node{'s' if nodes != '1' else ''}"
    if names := env.get("SLURM_JOB_NODELIST"):
        text += f": {names[:200]}"
        try:
            expand(names)
        except ValueError as problem:
            yield error(
                f"Slurm job {env['SLURM_JOB_ID']}; SLURM_JOB_NODELIST is {problem}",
                "unset the variables of another job, or run this inside the allocation",
            )
            return
    left = _slurm_left(machine, now)
    if left is None:
        yield ok(f"{text}; time left not known")
        return
    text += f"; {seconds(max(0.0, left))} left"
    stated = machine.job.run.grace_s
    if left < stated:
        yield error(
            f"{text}, less than run.grace_s={stated:g} s, in which a stopped run saves its checkpoint",
            "ask for a new allocation",
        )
    elif left < _ENDS_SOON_S:
        grace = grace_left(stated, env, now)
        yield warn(
            f"{text}; a signal to stop now leaves {seconds(grace)}",
            "ask for more time, or submit with --signal=USR1@120 --requeue: the run saves, stops and resumes",
        )
    else:
        yield ok(text)


def _slurm_left(machine: CheckedMachine, now: float) -> float | None:
    """Returns the seconds until Slurm ends the allocation, or None. Slurm before 23.02 does not set the variable, but
    squeue tells: "4:59", "1-02:03:04", or a word for no limit."""
    end = machine.env.get("SLURM_JOB_END_TIME", "")
    if re.fullmatch(r"[0-9]{1,12}", end):
        return int(end) - now
    squeue = shutil.which("squeue", path=machine.env.get("PATH", ""))
    if squeue is None:
        return None
    with suppress(OSError):
        told = machine.call([squeue, "-h", "-j", machine.env["SLURM_JOB_ID"], "-o", "%L"], machine.seconds / 2).out
        if found := re.fullmatch(r"(?:([0-9]{1,4})-)?(?:([0-9]{1,2}):)?([0-9]{1,2}):([0-9]{1,2})", told.strip()):
            days, hours, minutes, rest = (int(number or 0) for number in found.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    return None


@check("launch", "launcher")
def launcher(machine: CheckedMachine) -> Problems:
    """Yields which launcher started this process, and what contradicts that."""
    if left := [name for name in _OWN if name in machine.env]:
        yield error(
            f"{', '.join(left)} set: `phalanx train` would take itself for a rank of a run that is not there",
            f"unset {' '.join(left)}",
        )
        return
    try:
        ranks = detect(machine.env)
    except JobError as problem:
        message, _, advice = str(problem).rpartition("\n")
        yield error(" ".join(message.split()), advice)
        return
    if ranks is None:
        yield ok("no launcher: `phalanx train` starts its own processes")
        return
    yield ok(
        f"{ranks.source}: {ranks.world} ranks, {ranks.local_world or '?'} on this node"
        + (f", node {ranks.node_rank}" if ranks.node_rank is not None else "")
    )
    if machine.has_job and ranks.world != machine.job.layout.processes:
        layout = machine.job.layout
        yield error(
            f"{ranks.source} started {ranks.world} ranks, but the layout {layout.line()} has {layout.processes}",
            f"start {layout.processes} processes, or change the layout",
        )


_SLOW_NAME_S = 2.0
_CONNECT_S = 3.0
_FEW_PORTS = 1000
_NAME_HANGS = "a name server does not answer: put this host into /etc/hosts, or repair /etc/resolv.conf"
Interfaces = Callable[[], Mapping[str, str]]


@check("network", "host name", _NAME_HANGS)
def host_name(machine: CheckedMachine, name: str = socket.gethostname()) -> Problems:
    """Yields the addresses of this machine's own name, which gloo looks up."""
    began = time.monotonic()
    try:
        found = machine.resolve(name, None, type=socket.SOCK_STREAM)
    except OSError as problem:
        yield warn(
            f"{name} does not resolve: {problem.strerror or problem}; gloo and torchrun look it up",
            f"add a line to /etc/hosts: ADDRESS {name}; or set GLOO_SOCKET_IFNAME, and torchrun's --local-addr",
        )
        return
    took = time.monotonic() - began
    own = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    text = f"{name} is {', '.join(own[:4])}"
    if took > _SLOW_NAME_S:
        yield warn(f"{text}, after {seconds(took)}", _NAME_HANGS)
    elif machine.several_nodes and all(address.startswith("127.") or address == "::1" for address in own):
        yield warn(
            f"{text}: only this machine reaches that",
            "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes",
        )
    return text


@check("network", "loopback")
def loopback(_: CheckedMachine) -> Problems:
    if problem := _reaches_itself("127.0.0.1"):
        yield error(f"127.0.0.1: {problem}", "ip link set lo up")
    return "127.0.0.1 answers"


def _reaches_itself(address: str) -> str:
    """Returns why a listener at an own address is not reached; empty if it is."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname()[:2], _CONNECT_S):
                server.accept()[0].close()
    except OSError as problem:
        return str(problem.strerror or problem)
    return ""


@check("network", "interface", _NAME_HANGS)
def interface(machine: CheckedMachine, interfaces: Interfaces = interfaces) -> Problems:
    """Yields the interface that gloo and NCCL take, and whether a listener there is reached."""
    known = interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in known.items()) or "none has an IPv4 address"
    problems = False
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        wanted = machine.env.get(variable, "")
        if wanted and not _matching(variable, wanted, known):
            problems = True
            yield error(
                f"{variable}={wanted[:80]} names no interface with an address; there are: {listed}",
                f"unset {variable}, or set it to one of them",
            )
    if problems:
        return
    name, reason = chosen(machine, known)
    if name is None:
        yield ok(f"no interface is set, and the host's name leads to none; there are: {listed}")
        return
    text = f"{name} {known[name]} ({reason})"
    if problem := _reaches_itself(known[name]):
        yield error(
            f"{text}: a listener there is not reached: {problem}",
            "look for a firewall on this machine (nft list ruleset), or an address that it does not own (ip address)",
        )
    else:
        others = ", ".join(f"{other} {address}" for other, address in known.items() if other not in (name, "lo"))
        yield ok(text + (f"; also {others}" if others else ""))


def _matching(variable: str, wanted: str, known: Mapping[str, str]) -> list[str]:
    """Returns the interfaces that a variable names: NCCL's is a list of prefixes, of whole names after `=`, or of
    those to leave out after `^`; gloo's is a list of names."""
    names = [name.strip() for name in wanted.lstrip("^=").split(",")]
    if not variable.startswith("NCCL") or wanted.startswith("="):
        # torch starts one gloo device per name, so each has to exist.
        return names if all(name in known for name in names) else []
    begins = [name for name in known if any(name.startswith(prefix) for prefix in names if prefix)]
    return [name for name in known if name not in begins] if wanted.startswith("^") else begins


def chosen(machine: CheckedMachine, known: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns the interface that gloo takes on this machine, and why; None if that cannot be told."""
    ranks = machine.ranks
    if not machine.several_nodes and (ranks is None or ranks.one_node) and "lo" in known:
        return "lo", "all ranks are on this machine"
    if wanted := machine.env.get("GLOO_SOCKET_IFNAME"):
        return next(iter(_matching("GLOO_SOCKET_IFNAME", wanted, known)), None), "GLOO_SOCKET_IFNAME"
    host, _ = _endpoint(machine)
    if host and machine.has_job and machine.job.run.nnodes:
        name = interface_towards(host)
        return (name if name in known else None), f"leads to {host}"
    try:
        entries = machine.resolve(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None, ""
    own = {str(entry[4][0]) for entry in entries}
    return next((name for name, address in known.items() if address in own), None), "this host's name"


@check("network", "ports")
def ports(machine: CheckedMachine) -> Problems:
    """Yields the range of ports for outgoing connections, and whether a fixed port lies in it."""
    numbers = re.findall(r"[0-9]+", machine.read("/proc/sys/net/ipv4/ip_local_port_range", "32768 60999"))
    low, high = int(numbers[0]), int(numbers[1])
    if high - low < _FEW_PORTS:
        yield warn(
            f"outgoing connections have the ports {low} to {high} only", "widen net.ipv4.ip_local_port_range (sysctl)"
        )
        return
    stated = machine.env.get("MASTER_PORT", "")
    if stated and not (re.fullmatch(r"[0-9]{1,5}", stated) and int(stated) < 65536):
        yield error(f"MASTER_PORT={stated[:40]} is not a port", "set a number from 1024 to 65535")
    elif stated and low <= int(stated) <= high and "TORCHELASTIC_RUN_ID" not in machine.env:
        yield warn(
            f"MASTER_PORT={stated} lies among the ports of outgoing connections, {low} to {high}: it may be taken",
            f"set a port below {low}",
        )
    return f"outgoing {low} to {high}" + (f", MASTER_PORT={stated}" if stated else "")


def _endpoint(machine: CheckedMachine) -> tuple[str, int]:
    """Returns where the nodes of the run meet: host and port; an empty host if nothing says it."""
    if machine.has_job and machine.job.run.rdzv_endpoint:
        return machine.job.run.endpoint
    port = machine.env.get("MASTER_PORT", "")
    return (machine.env.get("MASTER_ADDR", ""), int(port)) if re.fullmatch(r"[0-9]{1,5}", port) else ("", 0)


@check("network", "rendezvous", _NAME_HANGS)
def rendezvous(machine: CheckedMachine) -> Problems:
    """Yields whether the address where the nodes meet, if there is one, resolves, and is free or reached."""
    host, port = _endpoint(machine)
    if not host:
        return
    try:
        found = machine.resolve(host, port, type=socket.SOCK_STREAM)
    except OSError as problem:
        yield error(
            f"{host} does not resolve: {problem.strerror or problem}", "use an address, or a name that every node knows"
        )
        return
    family, kind, protocol, _, address = found[0]
    text = f"{host}:{port}" + (f" ({address[0]})" if address[0] != host else "")
    way = interface_towards(address[0]) if family == socket.AF_INET else None
    text += f" through {way}" if way else ""
    reached = _connect(family, kind, protocol, address)
    if not _is_own(family, kind, protocol, address):
        if reached in ("", "refused"):
            # Refused is an answer: the host is there, and nothing filters the port. Its program may start later.
            yield ok(f"{text}: {'answers' if not reached else 'the host answers, nobody listens there yet'}")
        else:
            yield error(
                f"{text}: {reached}", f"check the address, and a firewall between here and there: nc -vz {host} {port}"
            )
    elif reached == "" and machine.ranks is None:
        yield error(f"{text}: another program listens at this port of this machine", "choose another port")
    return f"{text}, an address of this machine" + ("" if reached else "; it answers")


def _connect(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> str:
    """Returns why an address is not reached: empty if it is, "refused" if nobody listens there."""
    with socket.socket(family, kind, protocol) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(address)
        except TimeoutError:
            return f"no answer within {_CONNECT_S:g} s: the host is down, or a firewall drops packets"
        except OSError as problem:
            return "refused" if problem.errno == errno.ECONNREFUSED else str(problem.strerror or problem)
    return ""


def _is_own(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
