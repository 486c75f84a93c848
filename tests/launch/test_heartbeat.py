"""Heartbeat files: what a rank writes is what the watchdog reads, also after the rank died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Call, ChannelKey, Heartbeat, HeartbeatFile, Phase

HERE = "/hidden/"


@pytest.fixture
def beat(tmp_path: Path) -> Heartbeat:
    return Heartbeat(tmp_path, rank=2, world=8)


@pytest.fixture
def file(beat: Heartbeat, tmp_path: Path) -> HeartbeatFile:
    return HeartbeatFile(tmp_path / "rank_2.beat")


def call(beat: Heartbeat, *, kind: str = "all", peer: int = -1, group: str = "g", **changes) -> Call:
    values = {"operation": "all_reduce", "axis": "tp", "dtype": "float32", "shape": (4, 8), "nbytes": 128}
    channel = beat.channel(group, kind, range(0, 8, 2), peer)
    return beat.begin(channel, **{**values, "waits": False, "on_device": False, "hidden": HERE, **changes})


def test_identity_and_progress(beat: Heartbeat, file: HeartbeatFile) -> None:
    record = file.read()
    assert (record.rank, record.world, record.pid, record.step) == (2, 8, os.getpid(), 0)
    assert record.phase is Phase.START
    assert not record.trained
    assert not record.amid_training
    before = record.beat
    assert beat.enter(Phase.DATA) is Phase.START
    beat.steps_done(5)
    record = file.read()
    assert (record.phase, record.step) == (Phase.DATA, 5)
    assert record.beat > before
    assert record.phase_began <= record.beat


def test_a_call_from_its_start_to_its_end(beat: Heartbeat, file: HeartbeatFile) -> None:
    pending = call(beat)
    (found,) = file.read().calls
    assert (found.operation, found.axis, found.dtype, found.shape) == ("all_reduce", "tp", "float32", (4, 8))
    assert (found.channel, found.sequence, found.waiting, found.done) == (ChannelKey("g"), 1, False, False)
    assert found.source.startswith("tests/launch/test_heartbeat.py:")
    pending.waits()
    assert file.read().calls[0].waiting
    pending.done()
    assert file.read().calls[0].done
    assert file.read().groups == {"g": (0, 2, 4, 6)}


def test_a_server_s_thread_that_expects_a_message_blocks_nothing(beat: Heartbeat, file: HeartbeatFile) -> None:
    def receive() -> None:
        call(beat, kind="receive", operation="receive", peer=4, waits=True)

    receive()
    server = threading.Thread(target=receive)
    server.start()
    server.join()
    assert [found.waiting for found in file.read().calls] == [True, False]


def test_channels_are_counted_one_by_one(beat: Heartbeat, file: HeartbeatFile) -> None:
    for _ in range(3):
        call(beat)
    call(beat, kind="send", operation="send", peer=4)
    call(beat, kind="receive", operation="receive", peer=4)
    call(beat, group="other")
    assert file.read().started == {
        (ChannelKey("g"), False): 3,
        (ChannelKey("g", 2, 4), False): 1,
        (ChannelKey("g", 4, 2), True): 1,
        (ChannelKey("other"), False): 1,
    }


def test_the_ring_keeps_the_newest_calls(beat: Heartbeat, file: HeartbeatFile) -> None:
    old = call(beat)
    for _ in range(heartbeat.RING_CALLS):
        call(beat)
    old.waits()  # its place belongs to another call by now
    old.done()
    calls = file.read().calls
    assert [found.number for found in calls] == list(range(2, heartbeat.RING_CALLS + 2))
    assert not any(found.done or found.waiting for found in calls)
    assert [found.sequence for found in file.read(3).calls] == [found.sequence for found in calls[-3:]]


def test_a_half_written_call_is_left_out(beat: Heartbeat, file: HeartbeatFile) -> None:
    for _ in range(3):
        call(beat)
    beat.words[heartbeat.RING + 2 * heartbeat.CALL_WORDS + heartbeat.NUMBER_AGAIN] = 0  # as if killed in between
    assert [found.number for found in file.read().calls] == [1, 3]


@given(
    st.sampled_from(heartbeat.OPERATIONS),
    st.sampled_from(heartbeat.DTYPES),
    st.lists(st.integers(0, 2**20), max_size=6),
    st.integers(0, 2**60),
    st.booleans(),
)
def test_any_call_is_read_as_it_was_written(tmp_path_factory, operation, dtype, shape, nbytes, on_device) -> None:
    directory = tmp_path_factory.mktemp("beats")
    beat = Heartbeat(directory, 0, 8)
    call(beat, operation=operation, dtype=dtype, shape=shape, nbytes=nbytes, on_device=on_device)
    (found,) = HeartbeatFile(directory / "rank_0.beat").read().calls
    assert (found.operation, found.dtype, found.nbytes, found.on_device) == (operation, dtype, nbytes, on_device)
    if len(shape) <= heartbeat.SHAPE_WORDS:
        assert list(found.shape) == shape


def test_own_time_is_that_of_steps_without_waiting(
    beat: Heartbeat, file: HeartbeatFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(10**9, 10**12, 10**9))
    monkeypatch.setattr(heartbeat, "_now", lambda: next(times))
    beat.enter(Phase.FORWARD_BACKWARD)  # at 1 s
    pending = call(beat)
    pending.waits()  # 3 s
    pending.done()  # 4 s
    beat.enter(Phase.OPTIMIZER)  # 5 s
    beat.enter(Phase.SAVE)  # 6 s
    beat.enter(Phase.DATA)
    assert file.read().own_s == pytest.approx(4)  # from 1 to 6 s, less 1 s of waiting


def test_names_that_do_not_fit_are_left_out(beat: Heartbeat, file: HeartbeatFile) -> None:
    for number in range(heartbeat.CHANNELS + 5):
        call(beat, group=f"{number}" + "x" * 200)
    record = file.read()
    assert len(record.groups) < heartbeat.CHANNELS
    assert all(found.channel.group in record.groups for found in record.calls)


def test_without_a_heartbeat_nothing_happens() -> None:
    assert heartbeat.own() is None
    heartbeat.beat()
    heartbeat.training(3, 0)
    with heartbeat.within(Phase.SAVE):
        heartbeat.steps_done(1)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(heartbeat.FILE_BYTES))
    with pytest.raises(ValueError, match="not a heartbeat file"):
        HeartbeatFile(tmp_path / "x")


KILLED = """
import os, signal, sys
from pathlib import Path
from phalanx.launch.watchdog import heartbeat
heartbeat.start(Path(sys.argv[1]), 0, 1)
heartbeat.training(6, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_record_survives_its_rank(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    record = HeartbeatFile(tmp_path / "rank_0.beat").read()
    assert (record.step, record.amid_training) == (6, True)


@pytest.mark.parametrize("changes", [{"dtype": "int32"}, {"operation": "all_reduce_max"}, {"shape": (8, 4)}])
def test_the_digest_of_a_channel_keeps_any_call_that_differs(tmp_path: Path, changes: dict[str, object]) -> None:
    digests = []
    for rank in range(2):
        beat = Heartbeat(tmp_path, rank=rank, world=2)
        for number in range(2000):  # more than are recorded
            call(beat, **(changes if rank and number == 5 else {}))
        digests.append(HeartbeatFile(tmp_path / f"rank_{rank}.beat").read().calls[-1].digest)
    assert digests[0] != digests[1]
