"""The memory of nodes for the newest state: what a launcher copies from the one before it, and whom it answers."""

import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash

from phalanx.errors import RunError
from phalanx.launch.peers import COPIED, REPORT, SHARD, StateMemory, fetch, fetch_report, parts_in

PART = "step-000020-2-0123456789abcdef/rank-00001"
KEY = "a key"


@pytest.fixture
def start() -> Iterator[Callable[..., StateMemory]]:
    """Starts memories, by default of several nodes on this machine."""
    with ExitStack() as held:
        told: list[str] = []

        def start(towards: str = "127.0.0.1") -> StateMemory:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="phalanx_test_")))
            memory = held.enter_context(StateMemory(folder / "state", towards, lambda: KEY, 5.0, told.append))
            memory.told = told
            return memory

        yield start


def write(memory: StateMemory, part: str, content: bytes = b"state" * 1000, *, damaged: bool = False) -> None:
    path = memory.folder / "own" / part
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(SHARD).write_bytes(content[::-1] if damaged else content)
    digest = xxhash.xxh3_128(content).hexdigest()
    report = {"file": f"{path.name}{SHARD}", "bytes": len(content), "xxh3_128": digest, "tensors": {}}
    path.with_suffix(REPORT).write_text(json.dumps(report))


def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_each_node_of_a_ring_has_the_parts_of_the_one_before_it(start):
    memories = [start() for _ in range(3)]
    ring = tuple(memory.address for memory in memories)
    for place, memory in enumerate(memories):
        write(memory, f"step-000020-3-0123456789abcdef/rank-{place:05d}", bytes([place]) * 100_000)
        assert json.loads(memory.variables(ring, place)["PHALANX_MEMORY"]) == {
            "folder": str(memory.folder),
            "nodes": list(ring),
            "place": place,
        }
    for place, memory in enumerate(memories):
        part, before = f"step-000020-3-0123456789abcdef/rank-{place:05d}", (place - 1) % 3
        soon((memory.folder / "own" / part).with_suffix(COPIED).exists)
        copies = memory.folder / "copies"
        assert parts_in(copies) == [f"step-000020-3-0123456789abcdef/rank-{before:05d}"]
        assert (copies / parts_in(copies)[0]).with_suffix(SHARD).read_bytes() == bytes([before]) * 100_000
    first, copy = memories[0], parts_in(memories[1].folder / "copies")[0]
    write(first, "step-000021-3-0123456789abcdef/rank-00000")
    soon(lambda: len(parts_in(memories[1].folder / "copies")) == 2)
    assert fetch_report(memories[1].address, KEY, copy, 5.0), "copies are given, too"
    for path in (memories[1].folder / "copies" / copy).parent.iterdir():
        path.unlink()
    write(first, "step-000022-3-0123456789abcdef/rank-00000")
    soon(lambda: "step-000022-3-0123456789abcdef/rank-00000" in parts_in(memories[1].folder / "copies"))
    assert copy not in parts_in(memories[1].folder / "copies"), "what has been removed is not copied again"


def test_a_damaged_part_is_not_taken(start, tmp_path):
    one, other = start(), start()
    write(one, PART, damaged=True)
    with pytest.raises(ValueError, match="does not match its digest"):
        fetch(one.address, KEY, PART, tmp_path, 5.0)
    assert not list(tmp_path.rglob("*.safetensors")) + list(tmp_path.rglob("*.json"))
    other.variables((one.address, other.address), 1)
    soon(lambda: any("does not match its digest" in line for line in other.told))
    report = (one.folder / "own" / PART).with_suffix(REPORT)
    report.write_text(report.read_text().replace('"bytes": 5000', '"bytes": 5'))
    with pytest.raises(ValueError, match="has 5000 bytes, its report says 5"):
        fetch(one.address, KEY, PART, tmp_path, 5.0)


@pytest.mark.parametrize(
    "line",
    [
        {"key": "another", "copied": []},
        {"key": "", "copied": []},
        {"copied": []},
        {"key": KEY, "part": "../../../etc/passwd"},
        {"key": KEY, "part": f"{PART}/../../x"},
        {"key": KEY, "part": "step-000009-2-0123456789abcdef/rank-00000"},
        {"key": KEY, "part": 3},
        ["GET / HTTP/1.1"],
    ],
)
def test_strangers_and_other_requests_get_no_answer(start, line):
    memory = start()
    write(memory, PART)
    host, port = memory.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(json.dumps(line).encode() + b"\n")
        assert connection.makefile("rb").read() == b""
    memory.mark(["../../x", PART, None])
    assert (memory.folder / "own" / PART).with_suffix(COPIED).exists()
    assert fetch_report(memory.address, KEY, PART, 5.0).startswith(b'{"file"')


def test_a_run_without_a_key_answers_nobody(start):
    memory = start()
    memory.key = lambda: ""
    with pytest.raises(ConnectionResetError, match="does not answer"):
        fetch_report(memory.address, "", PART, 5.0)


def test_one_node_listens_nowhere_and_a_disk_is_no_memory(start, tmp_path):
    assert start("").address == ""
    with pytest.raises(RunError, match=r"/dev/shm, which this user cannot write, .* docker run --shm-size"):
        StateMemory(tmp_path / "state", "", lambda: "", 5.0, print)
