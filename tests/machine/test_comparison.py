"""Several nodes: what they tell each other, and what is made of it."""

import socket
import threading
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from machine.machines import machine
from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.machine import nodes
from phalanx.machine.checks import CheckResult
from phalanx.machine.nodes import Agenda, Formed, Hello, NodeListener, NodesMeeting, SeenNodes

FINE = CheckResult("limits", "memory", "OK", "much")
AT = NodeListener("10.0.0.1", 5, "eth0", "w")
GROUP = Formed("", 0.1, 0.001, ("a", "b"), (), "", 5.0)
SEEN = SeenNodes((), 1, True)


def hello(host, leads=True, findings=(FINE,), listener=AT):
    return Hello(host, leads, tuple(each.as_dict() for each in findings), listener)


TWO = {0: hello("a"), 1: hello("b")}
ALL_SEEN = {0: SEEN, 1: SEEN}


def found(world=2, hellos=None, seen=None, groups=None, folder="/runs"):
    lines = nodes.lines(world, hellos or TWO, seen or ALL_SEEN, groups, folder)
    return {line.check: line for line in lines if line.group == "nodes"}


def test_nodes_that_agree():
    lines = found(groups={0: GROUP, 1: GROUP})
    assert {line.status for line in lines.values()} == {"OK"}
    assert set(lines) == {"interfaces", "reachability", "run directory", "process group", "same program", "clocks"}
    assert lines["reachability"].text == "2 connections between 2 nodes"


def test_a_rank_that_says_nothing():
    line = found(hellos={0: hello("a")}, seen={0: SEEN})["ranks"]
    assert (line.status, line.text) == ("ERROR", "rank 1 of 2 did not report")


def test_a_pair_that_does_not_reach_each_other():
    lines = found(seen={0: replace(SEEN, unreached=((1, "no answer within 3 s"),)), 1: SEEN})
    assert lines["reachability"].text == "a does not reach b at 10.0.0.1 (eth0): no answer within 3 s"
    assert lines["reachability"].hosts == ("a", "b")
    assert "repair the other errors" in lines["process group"].remedy


def test_a_node_that_does_not_finish():
    assert found(seen={0: SEEN})["reachability"].hosts == ("b",)


def test_a_node_with_a_disk_of_its_own():
    line = found(seen={0: SEEN, 1: replace(SEEN, sees=False)})["run directory"]
    assert (line.status, line.hosts) == ("ERROR", ("b",))


def test_an_interface_that_is_not_known():
    assert nodes.lines(2, {0: hello("a"), 1: hello("b", listener=None)}, ALL_SEEN, None, "")[2].hosts == ("b",)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            {0: Formed("wait timeout after 30 s"), 1: Formed("no address for nosuch0")},
            "rank 1 on b: no address",
        ),
        ({0: GROUP}, "some ranks are silent"),
    ],
)
def test_a_group_that_is_not_formed(groups, text):
    line = found(groups=groups)["process group"]
    assert line.status == "ERROR"
    assert text in line.text


def test_ranks_that_differ():
    differs = (("torch version", "rank 1 on host b has torch 2.11", False),)
    line = found(groups={0: replace(GROUP, differs=differs), 1: GROUP})["same program"]
    assert (line.status, line.text) == ("ERROR", "rank 1 on host b has torch 2.11")
    rounding = (("processor capability", "rank 1 on host b has AVX2", True),)
    assert found(groups={0: replace(GROUP, differs=rounding), 1: GROUP})["same program"].status == "WARN"


def test_clocks_that_differ():
    assert (
        found(groups={0: replace(GROUP, skew="the clock of rank 1 is 9 s ahead"), 1: GROUP})["clocks"].status == "WARN"
    )


def test_a_report_of_another_version():
    strange = Hello("b", True, ({"status": "FINE"},), AT)
    assert found(hellos={0: hello("a"), 1: strange})["report"].status == "ERROR"


def test_a_message_of_another_version_counts_as_none():
    store = HashStore()
    store.set(nodes._key("seen", 1), '{"reached": 3}')
    assert NodesMeeting(store, 0, 2, 0.2).hear("seen", [1], SeenNodes) == {}


def test_nodes_with_one_name_are_told_apart():
    hellos = {0: hello("vm"), 1: hello("vm", leads=False), 2: hello("vm"), 3: hello("b")}
    assert nodes.labels_of(hellos) == {0: "vm/rank 0", 1: "vm/rank 0", 2: "vm/rank 2", 3: "b"}


def together(world, work):
    """Returns the results of `work(store, rank)` in one thread per rank."""
    store, results = HashStore(), {}
    threads = [
        threading.Thread(target=lambda rank=rank: results.update({rank: work(store, rank)})) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def compared(tmp_path, monkeypatch, interface="lo"):
    """Returns what two nodes find on one machine, without forming a group."""
    monkeypatch.setattr(nodes, "_group", lambda *_: GROUP)
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    def work(store, rank):
        job = f"model=tiny run.dir={tmp_path} cluster.nodes=2 --dp-replicate 2 global_batch=8"
        own = machine(job=job, env={"GLOO_SOCKET_IFNAME": interface})
        meeting = NodesMeeting(store, rank, 2, 5.0)
        lines = nodes.compare(own, meeting, Ranks(rank, 2, 0, 1, rank, "test"), [FINE])
        meeting.part()
        return lines

    results = together(2, work)
    assert results[1] is None
    return {line.check: line for line in results[0]}


def test_two_nodes_meet(tmp_path, monkeypatch):
    lines = compared(tmp_path, monkeypatch)
    assert {line.status for line in lines.values()} == {"OK"}
    assert lines["reachability"].text == "2 connections between 2 nodes"
    assert lines["run directory"].text == f"{tmp_path} is seen by 2 nodes"
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_that_do_not_reach_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "knock", lambda *_: "a firewall")
    lines = compared(tmp_path, monkeypatch)
    assert lines["reachability"].status == lines["process group"].status == "ERROR"


def test_a_folder_that_the_other_node_does_not_see(tmp_path, monkeypatch):
    from phalanx.train import agreement as shared

    monkeypatch.setattr(shared, "sees", lambda path, deadline: False)
    assert compared(tmp_path, monkeypatch)["run directory"].status == "ERROR"


def test_no_interface(tmp_path, monkeypatch):
    assert compared(tmp_path, monkeypatch, interface="nosuch0")["interfaces"].status == "WARN"


def test_knocking():
    found = machine(job="model=tiny --dp-replicate 2 global_batch=8", env={"GLOO_SOCKET_IFNAME": "lo"})
    with nodes.listener(found, "") as own:
        assert own is not None
        assert nodes.knock(own.address, own.port, own.word) == ""
        assert "another program" in nodes.knock(own.address, own.port, "other")
    assert "refused" in nodes.knock(own.address, own.port, own.word)


def test_a_listener_that_says_nothing(monkeypatch):
    monkeypatch.setattr(nodes, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "firewall" in nodes.knock("127.0.0.1", server.getsockname()[1], "w")


def test_a_leader_that_waits_for_one_who_does_not_come():
    assert NodesMeeting(HashStore(), 0, 2, 0.2).hear("hello", [1], Hello) == {}
    assert NodesMeeting(HashStore(), 1, 2, 0.1).agree("agenda", Agenda({}, "", True)) is None


@pytest.mark.parametrize("most", [2, 3])
def test_nodes_of_an_endpoint_get_numbers(most):
    results = together(2, lambda store, rank: nodes._numbered(store, rank == 0, most, 0.5))
    assert results == {0: (0, 2), 1: (1, 2)}


def test_an_endpoint_where_nobody_listens(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(nodes, "is_this_machine", lambda host: False)
    words = f"model=tiny dp_replicate=2 run.nnodes=2 run.rdzv_endpoint=127.0.0.1:{port}"
    with pytest.raises(RunError, match=f"nobody answers at 127.0.0.1:{port} after 0 s"):
        nodes.by_endpoint(machine(job=words, seconds=0.05), [])
