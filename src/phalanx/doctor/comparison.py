"""The lines about several nodes, from what each of them has told (nodes.py). Pure functions of JSON-able values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.doctor.findings import CheckResult, error, ok, warn
from phalanx.units import counted, seconds

Told = Mapping[int, Mapping[str, Any]]
"""What ranks have told, by rank; those that told nothing are missing."""
_SHOWN = 6
_LOG = "look at its log: it ended, or hangs"
_NETWORK = (
    "open all TCP ports between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to a network that all share"
)
_SAME = "give every node the same installation, job and settings"


def lines(world: int, hellos: Told, seen: Told, groups: Told | None, folder: str) -> list[CheckResult]:
    """Returns the lines of all nodes, and those about their differences.

    Args:
        world: the number of ranks.
        hellos: the host, the findings and the listener of every rank.
        seen: for the first rank of each node the nodes that it does not reach, and whether it sees the token.
        groups: what every rank found in the process group; None if it was not formed.
        folder: the folder of the token; empty if there is none.
    """
    labels = labels_of(hellos)
    everywhere = tuple(dict.fromkeys(labels.values()))
    compared = [*_missing(world, hellos), *_interfaces(hellos, labels), *_reach(hellos, seen, labels)]
    compared += _shared(seen, labels, folder)
    compared += _group(groups, labels, world)
    told = [finding for rank, hello in sorted(hellos.items()) for finding in _findings(hello, labels[rank])]
    return [*told, *(replace(line, group="nodes", hosts=line.hosts or everywhere) for line in compared)]


def labels_of(hellos: Told) -> dict[int, str]:
    """Returns a name of each rank's node: its host name, with the node's first rank where several share a name."""
    hosts = [hello["host"] for hello in hellos.values() if hello["leads"]]
    found: dict[int, str] = {}
    latest: dict[str, str] = {}
    for rank, hello in sorted(hellos.items()):
        host = hello["host"]
        if hello["leads"] or host not in latest:
            latest[host] = host if hosts.count(host) < 2 else f"{host}/rank {rank}"
        found[rank] = latest[host]
    return found


def _line(check: str, finding: CheckResult, hosts: Sequence[str] = ()) -> CheckResult:
    return replace(finding, check=check, hosts=tuple(hosts))


def _findings(hello: Mapping[str, Any], label: str) -> list[CheckResult]:
    try:
        return [replace(CheckResult.from_dict(each), hosts=(label,)) for each in hello["findings"]]
    except (KeyError, TypeError, ValueError) as problem:
        return [CheckResult("nodes", "report", "ERROR", f"a report is not understood: {problem}", _SAME, (label,))]


def _missing(world: int, hellos: Told) -> Iterator[CheckResult]:
    if missing := [rank for rank in range(world) if rank not in hellos]:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        yield _line("ranks", error(f"rank {shown} of {world} did not report", _LOG))


def _interfaces(hellos: Told, labels: Mapping[int, str]) -> Iterator[CheckResult]:
    """Yields the interface of every node."""
    used = {labels[rank]: hello["listener"] for rank, hello in sorted(hellos.items()) if hello["leads"]}
    if silent := [label for label, at in used.items() if at is None]:
        remedy = "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes"
        yield _line("interfaces", warn("it cannot be told which interface gloo takes", remedy), silent)
    shown = [f"{label} {at['interface']} ({at['address']})" for label, at in used.items() if at]
    if len(used) > 1 and shown:
        yield _line("interfaces", ok(", ".join(shown[:_SHOWN]) + (", …" if len(shown) > _SHOWN else "")))


def _reach(hellos: Told, seen: Told, labels: Mapping[int, str]) -> Iterator[CheckResult]:
    """Yields which nodes do not reach which."""
    leaders = [rank for rank, hello in sorted(hellos.items()) if hello["leads"]]
    quiet = [rank for rank in leaders if rank not in seen]
    if quiet:
        yield _line("reachability", error("did not finish", _LOG), [labels[rank] for rank in quiet])
    unreached = [(rank, peer, why) for rank, each in sorted(seen.items()) for peer, why in each["unreached"]]
    for rank, peer, why in unreached[:_SHOWN]:
        at = hellos[peer]["listener"]
        text = f"{labels[rank]} does not reach {labels[peer]} at {at['address']} ({at['interface']}): {why}"
        yield _line("reachability", error(text, _NETWORK), (labels[rank], labels[peer]))
    if len(unreached) > _SHOWN:
        yield _line("reachability", error(f"and {counted(len(unreached) - _SHOWN, 'more pair')}", _NETWORK))
    if not unreached and not quiet and len(leaders) > 1:
        connections = counted(sum(each["peers"] for each in seen.values()), "connection")
        yield _line("reachability", ok(f"{connections} between {len(leaders)} nodes"))


def _shared(seen: Told, labels: Mapping[int, str], folder: str) -> Iterator[CheckResult]:
    if not folder or len(seen) < 2:
        return
    if blind := [labels[rank] for rank, each in sorted(seen.items()) if not each["sees"]]:
        remedy = "set run.dir to a folder on a file system that every node mounts"
        yield _line("run directory", error(f"{folder} is not the folder that rank 0 sees", remedy), blind)
    else:
        yield _line("run directory", ok(f"{folder} is seen by {len(seen)} nodes"))


def _group(groups: Told | None, labels: Mapping[int, str], world: int) -> Iterator[CheckResult]:
    """Yields whether gloo formed a group, and the facts in which its ranks differ."""
    if groups is None:
        yield _line(
            "process group", error("not tried: the nodes do not reach each other yet", "repair the other errors first")
        )
        return
    failed = {rank: each["problem"] for rank, each in groups.items() if "problem" in each}
    if failed or len(groups) < world:
        # The ranks that waited for the one that failed first say only that.
        by_worth = sorted(failed.items(), key=lambda item: ("timeout" in item[1], item[0]))
        why = next((f"rank {rank} on {labels[rank]}: {text}" for rank, text in by_worth), "some ranks are silent")
        yield _line("process group", error(f"gloo could not form it: {why}", _NETWORK))
        return
    took, latency = (max(each[name] for each in groups.values()) for name in ("took", "latency"))
    text = f"gloo formed it, {world} ranks, in {seconds(took)}; an all-reduce takes {1000 * latency:.1f}ms"
    yield _line("process group", ok(text))
    first = groups[0]
    for _, text, only_rounding in first["differs"]:
        if only_rounding:
            yield _line("same program", warn(f"{text}: rounding differs", "use nodes of one kind"))
        else:
            yield _line("same program", error(text, _SAME))
    if not first["differs"]:
        yield _line("same program", ok(f"{len(first['facts'])} facts agree: versions, source files, settings, job"))
    if first["skew"]:
        yield _line("clocks", warn(first["skew"], "set the clocks by NTP (chronyc tracking)"))
    else:
        yield _line("clocks", ok(f"no two clocks differ by more than {first['limit_s']:g} s"))
