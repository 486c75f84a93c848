"""Runs on several nodes: who takes part in which round, what travels between nodes, and links that break."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError, RunError
from phalanx.launch import nodes as meet
from phalanx.launch.hosts import interface_towards, is_this_machine
from phalanx.launch.nodes import (
    FIRST_CALL_S,
    HOST,
    Ending,
    GuestLink,
    HostLink,
    Membership,
    NodeFailure,
    NodeState,
    Notice,
    Round,
    Terms,
    decode_notice,
    decode_state,
    encode,
)

HERE = Path(__file__).parent
A, B, C = (NodeState(f"node-{name}", 2) for name in "abc")


def plan(number: int, members: tuple[int, ...], reason: str) -> Round:
    words = (f"cluster.nodes={len(members)}",)
    return Round(number, members, reason, "node-a", 29500 + number, f"{number} token", f"attempt_{number}", words)


class Nodes:
    """A membership whose clock is a number, with nodes that do what they are told."""

    def __init__(self, least: int, most: int, *states: NodeState):
        self.now = 0.0
        self.membership = Membership(Terms(least, most, 2, 600.0), plan, clock=lambda: self.now)
        self.states = {self.membership.join(state).slot: state for state in states}

    def tell(self, slot: int, **changes) -> Notice:
        self.states[slot] = dataclasses.replace(self.states[slot], **changes)
        return self.membership.report(slot, self.states[slot])

    def tick(self) -> tuple[int, ...] | None:
        """Lets the host decide, and begins the round on its nodes. Returns the members of a round that goes on."""
        before = self.membership.round
        self.membership.tick()
        current = self.membership.round
        if current is not None and current is not before:
            for slot in current.members:
                self.tell(slot, waits=False, round=current.number, failure=None)
        return current.members if current and self.membership.ending is None else None

    @property
    def reason(self) -> str:
        ending = self.membership.ending
        return ending.reason if ending else ""


def test_the_first_round_waits_for_all_nodes_but_not_for_ever() -> None:
    assert Nodes(1, 2, A, B).tick() == (0, 1)
    alone = Nodes(1, 2, A)
    assert alone.tick() is None
    alone.now = FIRST_CALL_S
    assert alone.tick() == (0,)
    short = Nodes(2, 3, A)
    short.now = 700.0
    short.tick()
    assert short.membership.ending == Ending("1 of at least 2 nodes came within 600 s (node-a)", code=1)


def test_a_node_that_is_lost_ends_the_round_and_the_others_begin_the_next() -> None:
    nodes = Nodes(1, 2, A, B)
    nodes.tick()
    nodes.membership.leave(1, "nothing was heard from it for 10 s")
    assert nodes.reason == "node node-b is lost: nothing was heard from it for 10 s"
    assert nodes.tick() is None, "the host's ranks still run"
    nodes.tell(HOST, waits=True)
    assert nodes.tick() == (0,)
    assert nodes.membership.round is not None
    assert nodes.membership.round.reason == "node node-b is lost: nothing was heard from it for 10 s"
    back = nodes.membership.join(B).slot
    nodes.states[back] = B
    nodes.tick()
    assert nodes.membership.ending == Ending("node node-b joins", saves=True)
    nodes.tell(HOST, waits=True)
    assert nodes.tick() == (0, back)


def test_without_enough_nodes_the_others_wait() -> None:
    nodes = Nodes(2, 2, A, B)
    nodes.tick()
    nodes.membership.leave(1, "its launcher has ended")
    nodes.tell(HOST, waits=True)
    assert nodes.tick() is None
    nodes.now = 601.0
    nodes.tick()
    assert nodes.membership.is_over


@pytest.mark.parametrize("final", [False, True])
def test_ranks_that_fail_on_one_node_end_the_round_on_all(final: bool) -> None:
    nodes = Nodes(2, 2, A, B)
    nodes.tick()
    nodes.tell(1, failure=NodeFailure(137, "Rank 2 of 4 was killed by SIGKILL.", final), waits=True)
    nodes.tick()
    assert nodes.reason == "node node-b: Rank 2 of 4 was killed by SIGKILL."
    nodes.tell(HOST, waits=True)
    assert nodes.tick() == (None if final else (0, 1))
    assert nodes.membership.is_over == final


def test_a_node_that_is_done_may_leave_while_others_write_their_last_lines() -> None:
    nodes = Nodes(2, 2, A, B)
    nodes.tick()
    nodes.tell(1, done=True)
    nodes.membership.leave(1, "its launcher has ended")
    assert nodes.tick() == (0, 1)


def test_a_node_with_another_number_of_ranks_is_refused() -> None:
    nodes = Nodes(1, 2, A)
    assert "would start 4 ranks, and the host asks for 2" in nodes.membership.join(NodeState("b", 4)).refusal


def test_a_node_without_the_key_of_the_run_is_refused(tmp_path: Path) -> None:
    assert meet.known(tmp_path) == "", "a disk of its own"
    own = meet.make(tmp_path)
    assert meet.make(tmp_path) == meet.known(tmp_path) == own
    assert (tmp_path / meet.FILE).stat().st_mode & 0o777 == 0o600
    membership = Membership(Terms(1, 2, 2, 600.0), plan, own)
    assert membership.join(dataclasses.replace(A, key=own)).slot == HOST
    for other in ("", "Ä", own[:-1]):
        assert "the same run directory" in membership.join(dataclasses.replace(B, key=other)).refusal
    assert list(membership.nodes) == [HOST]
    (tmp_path / meet.FILE).unlink()
    (tmp_path / meet.FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a link"):
        meet.make(tmp_path)


def test_a_job_without_a_layout_for_the_nodes_that_are_left_ends_on_all() -> None:
    def refuse(*_) -> Round:
        raise JobError("no layout")

    membership = Membership(Terms(1, 1, 2, 600.0), refuse)
    membership.join(A)
    membership.tick()
    assert membership.ending == Ending("no layout", code=2)


@given(st.lists(st.sampled_from(["leave", "join", "fail", "lose", "tick"]), max_size=40), st.randoms())
def test_rounds_have_enough_nodes_the_host_and_one_successor(events: list[str], random) -> None:
    nodes = Nodes(2, 3, A, B, C)
    generations: list[str] = []
    for event in events:
        guests = [slot for slot in nodes.membership.nodes if slot != HOST]
        running = [slot for slot in nodes.membership.nodes if not nodes.states[slot].waits]
        if event == "leave" and guests:
            nodes.membership.leave(random.choice(guests), "gone")
        elif event == "join":
            nodes.states[nodes.membership.join(B).slot] = B
        elif event == "fail" and running:
            nodes.tell(random.choice(running), failure=NodeFailure(1, "a bug", False), waits=True)
        elif event == "lose" and running:
            nodes.tell(random.choice(running), waits=True)
        nodes.tick()
        if nodes.membership.ending is not None:  # every node does as the host says
            for slot in nodes.membership.nodes:
                nodes.tell(slot, waits=True)
        members = nodes.tick()
        if members is not None:
            assert members[0] == HOST
            assert 2 <= len(members) <= 3
            assert nodes.membership.round is not None
            if nodes.membership.round.generation not in generations:
                generations.append(nodes.membership.round.generation)
    assert len(generations) == len(set(generations))


STATES = st.builds(
    NodeState,
    st.text(max_size=5),
    st.integers(1, 9),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
    st.none() | st.builds(NodeFailure, st.integers(0, 255), st.text(max_size=5), st.booleans()),
    st.text(max_size=5),
)


@given(
    STATES, st.integers(0, 9), st.none() | st.builds(Ending, st.text(max_size=5), st.booleans(), st.none() | st.just(1))
)
def test_messages_arrive_as_they_were_sent(state: NodeState, slot: int, ending: Ending | None) -> None:
    assert decode_state(encode(state)) == state
    notice = Notice(slot, plan(3, (0, 2), "why"), ending)
    assert decode_notice(encode(notice)) == notice


@pytest.mark.parametrize(
    "change",
    [
        {"round": {"members": [0], "words": ["run.dir=/elsewhere"]}},
        {"round": {"members": [True], "words": []}},
        {"round": {"attempt": "../../elsewhere"}},
        {"slot": "0"},
        {"extra": 1},
    ],
)
def test_whatever_else_arrives_is_refused(change: dict) -> None:
    found = json.loads(encode(Notice(0, plan(1, (0,), ""))))
    changed = {**found, **{k: {**found[k], **v} if isinstance(v, dict) else v for k, v in change.items()}}
    with pytest.raises(ValueError, match=r"."):
        decode_notice(json.dumps(changed).encode())
    for line in (b"", b"[]", b"{}", b"[" * 60_000, b"\xff", b"GET / HTTP/1.1\r\n"):
        with pytest.raises(ValueError, match=r"."):
            decode_state(line)


def soon(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_links_bring_nodes_together_and_notice_who_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.nodes._FAREWELL_S", 0.2)
    membership = Membership(Terms(1, 2, 2, 600.0), plan)
    host = HostLink(("127.0.0.1", 0), membership, A, silence_s=5.0)
    address = "127.0.0.1", host.port
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    guest = GuestLink(address, B, silence_s=5.0)
    soon(lambda: guest.notice.round and guest.notice.round.members == (0, 1))
    for link in (host, guest):
        link.exchange(waits=False, round=1)
    guest.close(0, "")
    soon(lambda: membership.ending)
    assert membership.ending == Ending("node node-b is lost: its launcher has ended")
    with pytest.raises(RunError, match=r"run.rdzv_endpoint 127\.0\.0\.1:\d+: Address already in use"):
        HostLink(address, Membership(Terms(1, 1, 2, 600.0), plan), A, 5.0)
    again = GuestLink(address, B, silence_s=5.0)
    soon(lambda: again.notice.slot == 2)
    host.close(3, "a mistake")
    assert membership.is_over
    soon(lambda: again.notice.ending and again.notice.ending.code == 3)
    alone = GuestLink(address, B, silence_s=5.0)
    soon(lambda: alone.notice.ending)
    assert alone.notice.ending == Ending(f"there is no connection to the host, 127.0.0.1:{host.port}")
    alone.close(0, "")
    again.close(0, "")


def test_the_addresses_of_this_machine() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")  # for documentation (RFC 5737)
    assert interface_towards("127.0.0.1") == "lo"
    with pytest.raises(RunError, match="no.such.host.invalid is no known host"):
        is_this_machine("no.such.host.invalid")


def test_two_launchers_run_a_round_and_one_goes_on_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(HERE)

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "node_program.py"), role, port, str(tmp_path), "until_go"]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def facts(rank: int) -> dict[str, object]:
        path = tmp_path / f"rank_{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    with start("guest") as guest, start("host") as host:
        try:
            soon(lambda: all(facts(rank).get("WORLD_SIZE") == "2" for rank in (0, 1)), 90)
            assert [facts(rank)["GROUP_RANK"] for rank in (0, 1)] == ["0", "1"]
            assert facts(0)["PHALANX_GENERATION"] == facts(1)["PHALANX_GENERATION"]
            assert facts(1)["words"] == ["++cluster.nodes=2"]
            assert facts(1)["PHALANX_STORE"] is None, "ranks of several nodes do not meet in a file"
            guest.kill()
            soon(lambda: facts(0)["WORLD_SIZE"] == "1", 60)
            assert facts(0)["words"] == ["++cluster.nodes=1"]
            (tmp_path / "go").touch()
            _, shown = host.communicate(timeout=60)
        finally:
            guest.kill()
            host.kill()
    assert host.returncode == 0, shown
    assert "phalanx: round 1 on 2 nodes, this is node 0, cluster.nodes=2" in shown
    assert "phalanx: the round ends: node " in shown
    assert "phalanx: round 2 on 1 node, this is node 0, cluster.nodes=1" in shown
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt_0", "attempt_1"]
