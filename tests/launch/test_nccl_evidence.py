"""Torch's flight recorder and NCCL's RAS as evidence beside the heartbeats: in documents, from a server, in a hang."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.local import launch_local
from phalanx.launch.watchdog import nccl
from phalanx.launch.watchdog.diagnosis import Limits

HERE = Path(__file__).parent


def flight(
    calls: list[tuple[str, list[int]]], *, begun: int = -1, ranks: str = "[0, 1, 2]", group: int = 1, name: str = "1"
) -> dict[str, Any]:
    """Returns a flight recorder with `calls`, (operation, size), in one group of which the device has begun `begun`."""
    entries = [
        {
            "pg_id": group,
            "process_group": [name, "mesh_tp"],
            "profiling_name": f"nccl:{operation}",
            "is_p2p": False,
            "collective_seq_id": number,
            "input_dtypes": ["Float"],
            "input_sizes": [size],
        }
        for number, (operation, size) in enumerate(calls, 1)
    ]
    status = {"last_enqueued_collective": str(len(calls)), "last_started_collective": str(begun)}
    return {"entries": entries, "pg_config": {name: {"ranks": ranks}}, "pg_status": {str(group): status}}


def compared(tmp_path: Path, *documents: Any) -> nccl.Evidence:
    for rank, document in enumerate(documents):
        (tmp_path / nccl.flight_name(rank)).write_text(json.dumps(document))
    return nccl.evidence(tmp_path, {100 + rank: rank for rank in range(len(documents))}, on_device=False)


def test_the_rank_that_has_not_called_is_named(tmp_path: Path) -> None:
    two, one = [("all_reduce", [4]), ("all_gather", [2, 8])], [("all_reduce", [4])]
    found = compared(tmp_path, flight(two), flight(one), flight(two))
    assert found.ranks == (1,)
    assert found.lines == (
        "Flight recorder: rank 1 has not called collective #2 of mesh_tp (1) (all_gather, Float, 2 × 8), unlike "
        "ranks 0, 2",
    )
    assert found.facts["flight_recorder"]["1"] == {"mesh_tp (1)": (1, -1)}


def test_the_rank_whose_device_is_behind_is_named(tmp_path: Path) -> None:
    calls = [("all_reduce", [4])] * 3
    found = compared(tmp_path, flight(calls, begun=3), flight(calls, begun=3), flight(calls, begun=2))
    assert found.ranks == (2,)
    assert "rank 2 is with its device before collective #3" in found.lines[0]


def test_calls_that_differ_are_told_with_their_sizes(tmp_path: Path) -> None:
    same = [("all_reduce", [4])]
    found = compared(tmp_path, flight(same), flight([("all_reduce", [5])]), flight(same))
    assert found.ranks == (1,)
    assert found.lines == (
        "Flight recorder: collective #1 of mesh_tp (1) differs: rank 1: all_reduce, Float, 5; ranks 0, 2: "
        "all_reduce, Float, 4",
    )


def test_a_group_is_known_by_its_name_not_by_its_number_on_a_rank(tmp_path: Path) -> None:
    """A rank that is in fewer groups counts them otherwise."""
    two, one = [("all_reduce", [4])] * 2, [("all_reduce", [4])]
    found = compared(tmp_path, flight(two, group=3, ranks="[0, 1]"), flight(one, group=1, ranks="[0, 1]"))
    assert found.ranks == (1,)


def test_a_rank_that_waits_in_another_group_is_not_to_blame(tmp_path: Path) -> None:
    """Rank 1 waits for rank 2 in a pipeline's group, so it has not come to the sum in which rank 0 waits."""
    two, one = [("all_reduce", [4])] * 2, [("all_reduce", [4])]
    middle = flight(one, ranks="[0, 1]", name="1")
    other = flight(two, ranks="[1, 2]", group=2, name="2")
    joined = {key: middle[key] | other[key] for key in ("pg_config", "pg_status")}
    joined["entries"] = middle["entries"] + other["entries"]
    last = flight(one, ranks="[1, 2]", group=1, name="2")
    assert compared(tmp_path, flight(two, ranks="[0, 1]", name="1"), joined, last).ranks == (2,)


def test_sizes_of_an_exchange_may_differ(tmp_path: Path) -> None:
    assert not compared(tmp_path, flight([("all_to_all", [4])]), flight([("all_to_all", [7])])).lines


def test_ranks_of_other_groups_are_not_compared(tmp_path: Path) -> None:
    """Two tensor-parallel groups have one description, and other ranks."""
    long, short = [("all_reduce", [4])] * 2, [("all_reduce", [4])]
    assert not compared(tmp_path, flight(long, ranks="[0]"), flight(short, ranks="[1]")).lines


@pytest.mark.parametrize("document", [None, [], {"entries": 3}, {"entries": [{}]}, {"pg_status": {"0": []}}, "x"])
def test_what_is_no_flight_recorder_counts_as_no_answer(tmp_path: Path, document: Any) -> None:
    assert compared(tmp_path, flight([("all_reduce", [4])]), document) == nccl.Evidence(
        facts={"flight_recorder": {"0": {"mesh_tp (1)": (1, -1)}}}
    )


def member(rank: int, **counts: int) -> dict[str, Any]:
    return {"rank": rank, "host": "node1", "pid": 100 + rank, "cuda_dev": rank, "collective_counts": counts}


STATUS: dict[str, Any] = {
    "nccl_version": "2.28.9",
    "communicators": [
        {
            "size": 4,
            "ranks": [member(0, AllReduce=7, AllGather=3), member(1, AllReduce=6, AllGather=3)],
            "missing_ranks": [
                {"host": "node2", "pid": 9, "cuda_dev": 2, "status": {"unresponsive": True, "considered_dead": False}},
                {"host": "node2", "pid": 8, "cuda_dev": 3, "status": {"unresponsive": True, "considered_dead": True}},
            ],
        }
    ],
}


def test_ras_names_ranks_that_are_behind_dead_or_silent() -> None:
    found = nccl.judge_ras(STATUS, {100: 0, 101: 1})
    assert found.lines == (
        "NCCL RAS: process 9 on node2 (GPU 2) does not answer",
        "NCCL RAS: process 8 on node2 (GPU 3) is dead",
        "NCCL RAS: rank 1 (GPU 1) has begun 6 × AllReduce, others 7, in a communicator of 4",
    )
    assert found.ranks == (1,)


@pytest.mark.parametrize("document", [None, [], {}, {"communicators": [{"size": "x"}]}])
def test_another_document_of_ras_says_nothing(document: Any) -> None:
    assert not nccl.judge_ras(document, {}).lines


@pytest.mark.parametrize(
    ("format_answer", "found"), [(b"OK\n", STATUS), (b"ERROR: Unknown command\n", None)], ids=["2.28", "2.24"]
)
def test_ras_is_asked_in_its_own_protocol(format_answer: bytes, found: Any) -> None:
    """NCCL 2.28 answers in JSON; older ones know text only."""
    with socket.create_server(("localhost", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                assert lines.readline() == b"CLIENT PROTOCOL 2\n"
                connection.sendall(b"SERVER PROTOCOL 2\n")
                assert lines.readline() == b"SET FORMAT json\n"
                connection.sendall(format_answer)
                if lines.readline() == b"VERBOSE STATUS\n":
                    connection.sendall(json.dumps(STATUS).encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert nccl.ask_ras(server.getsockname()[:2]) == found
        thread.join()


def test_without_ras_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{server.getsockname()[1]}")
    assert nccl.ask_ras() is None


def test_a_collective_of_torch_that_a_rank_does_not_call_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Heartbeats know the calls of an axis only. Gloo fills the same recorder as NCCL."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    options = {"processes": 2, "log_dir": tmp_path / "logs", "threads": 1, "all_ranks": False}
    code = launch_local(["torch_absent", str(tmp_path)], module="watched_program", limits=Limits(4.0, 120.0), **options)
    assert code == 124
    assert "Flight recorder: rank 1 has not called collective #" in capfd.readouterr().err
    hang = json.loads((tmp_path / "logs/attempt_0/hang.json").read_text())
    assert hang["culprits"] == [1]
    assert set(hang["flight_recorder"]) == {"0", "1"}
