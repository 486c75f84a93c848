"""Runs on several nodes, also behind remote shells."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
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
from phalanx.launch.start import HostCommand, RemoteNodes

# Runs on several nodes: who takes part in which round, what travels between nodes, and links that break.


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


def test_what_a_link_says_last_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.nodes._FAREWELL_S", 0.2)
    membership = Membership(Terms(2, 2, 2, 600.0), plan)
    host = HostLink(("127.0.0.1", 0), membership, A, silence_s=5.0)
    guest = GuestLink(("127.0.0.1", host.port), B, silence_s=5.0)
    soon(lambda: guest.notice.round)
    for link in (host, guest):
        link.exchange(waits=False, round=1)
    guest.exchange(done=True)
    guest.close(0, "")
    soon(lambda: 1 not in membership.nodes)
    assert membership.ending is None, "its ranks ended well, and those of the host go on"
    host.close(0, "")


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


# Nodes behind remote shells. A shell script stands in for ssh: it runs the command on this host.

PROGRAM = """
import sys
from phalanx.launch.start import HostCommand
from phalanx.launch.start import RemoteNodes
commands = [HostCommand((sys.argv[1], host, text), (host,)) for host, text in zip("ab", sys.argv[2:])]
sys.exit(RemoteNodes(commands, least=2, secrets={}, grace_s=5, bare_stdout=False).run())
"""


@pytest.fixture
def remote_shell(tmp_path: Path) -> str:
    """A program that takes HOST and a command for the shell."""
    path = tmp_path / "remote"
    path.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def run(remote_shell, capfd) -> Callable[..., tuple[int, str, str]]:
    def run(*texts: str, least: int = 2, secrets=None, bare: bool = False) -> tuple[int, str, str]:
        commands = [HostCommand((remote_shell, host, text), (host,)) for host, text in zip("ab", texts, strict=False)]
        nodes = RemoteNodes(commands, least=least, secrets=secrets or {}, grace_s=1, bare_stdout=bare)
        return nodes.run(), *capfd.readouterr()

    return run


def test_lines_have_their_host_in_front(run):
    code, out, err = run("echo one", "echo two >&2; printf three")
    assert code == 0
    assert sorted(out.splitlines()) == ["[a] one", "[b] three"]
    assert err == "[b] two\n"


def test_one_host_has_no_prefix_and_a_document_neither(run):
    assert run("echo one", least=1)[1] == "one\n"
    assert run("echo '{}'", "true", bare=True)[1] == "{}\n"


def test_what_is_no_text_and_what_a_terminal_obeys_is_shown(run):
    assert run(r"printf '\377 \033[1m\n'", least=1)[1] == "\ufffd \\x1b[1m\n"


def test_the_exit_code_is_that_of_the_rendezvous_host(run):
    assert run("exit 75", "exit 75")[0] == 75
    assert run("sleep 0.5; exit 4", "exit 1")[0] == 4
    assert run("kill -9 $$", "true")[0] == 137


def test_a_host_that_cannot_be_reached_stops_the_others(run):
    began = time.monotonic()
    wait = "read line; [ $line = SIGTERM ] && exit 143"
    code, _, err = run(wait, "exit 255")
    assert code == 1
    assert "b: the remote shell ended with 255: the host cannot be reached" in err
    assert "too few; they are stopped" in err
    assert time.monotonic() - began < 5


def test_others_do_not_wait_for_a_node_that_failed(run):
    code, _, err = run("read line; [ $line = SIGTERM ] && exit 143", "exit 2")
    assert code == 2
    assert "too few; they are stopped" in err


def test_a_program_that_is_not_there(run):
    code, _, err = run("/no/such/python", least=1)
    assert code == 1
    assert "127: the program was not found there" in err


def test_a_run_that_shrinks_goes_on_without_a_host(run):
    code, _, err = run("sleep 0.5", "exit 255", least=1)
    assert code == 0
    assert "too few" not in err


def test_secrets_come_by_standard_input(run):
    out = run("read line; echo $line", least=1, secrets={"HF_TOKEN": "x"})[1]
    assert json.loads(out) == {"HF_TOKEN": "x"}


def test_a_remote_shell_that_cannot_be_started():
    nodes = RemoteNodes([HostCommand(("/no/ssh", "a", "x"), ("a",))], least=1, secrets={}, grace_s=1, bare_stdout=False)
    with pytest.raises(RunError, match="give --remote-shell"):
        nodes.run()


def start(remote_shell: str, *texts: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, remote_shell, *texts],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_signal_reaches_every_node(remote_shell):
    process = start(remote_shell, *["echo ready; read line; echo got $line; exit 75"] * 2)
    assert process.stdout is not None
    ready = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGUSR1)
    shown = process.communicate(timeout=20)[0]
    assert sorted(ready) == ["[a] ready\n", "[b] ready\n"]
    assert sorted(shown.splitlines()) == ["[a] got SIGUSR1", "[b] got SIGUSR1"]
    assert process.returncode == 75


def test_nodes_learn_that_the_launcher_was_killed(remote_shell, tmp_path):
    end = f"echo ready; read line || echo ended > {tmp_path}/$0"
    process = start(remote_shell, end, end)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    told, until = tmp_path / "sh", time.monotonic() + 60
    while not (told.exists() and "ended" in told.read_text()):  # the shell creates it before it writes
        assert time.monotonic() < until, "no node has learnt it"
        time.sleep(0.05)
