"""Threads that write checkpoints while training goes on: what they agree on, and every way in which storage fails."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from checkpoint.contents import contents, save_tensors
from phalanx.checkpoint import save as saves
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import Retention, check
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part, Snapshot
from phalanx.checkpoint.writer import Order, Writer
from phalanx.errors import NotFiniteError, RunError
from warm import as_file

W = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def order(root, step=10, ranks=2, need=24, timeout_s=60.0):
    return Order(root, step, ranks, f"t{step}", need, {"samples": 5 * step}, Retention(), timeout_s)


def start(what, rank, check=lambda part: None):
    """The thread of one of two ranks, each with one row of w."""
    return Writer(what, rank, [Part("w", (2, 3), Box((rank, 0), (1, 3)), W[rank : rank + 1])], check, nice=True)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_threads_of_all_ranks_write_one_checkpoint_in_any_order(root):
    second = start(order(root), 1)
    first = start(order(root), 0)
    assert second.join(60)
    assert first.join(60)
    assert first.path == root / "step-000010"
    assert not first.error
    assert torch.equal(contents(first.path)["w"], W)
    assert names(root) == ["step-000010"]


def test_what_one_rank_reports_fails_the_checkpoint_and_not_the_next(root):
    def spoiled(part):
        raise NotFiniteError(f"step 10: {part.tensor} holds NaN")

    first, second = start(order(root), 0), start(order(root), 1, spoiled)
    assert first.join(60)
    assert second.join(60)
    assert [type(each.error) for each in (first, second)] == [NotFiniteError] * 2
    assert str(first.error) == "step 10: w holds NaN"
    assert first.path is None
    assert names(root) == []
    test_threads_of_all_ranks_write_one_checkpoint_in_any_order(root)


@pytest.fixture
def hanging(monkeypatch):
    """Writes of shard files hang until the event is set."""
    goes_on, write = threading.Event(), shard_file.write

    def hang(*arguments):
        goes_on.wait()
        return write(*arguments)

    monkeypatch.setattr(shard_file, "write", hang)
    yield goes_on
    goes_on.set()


def test_a_write_that_hangs_is_named_and_given_up_for_good(root, hanging):
    writer = start(order(root, ranks=1, timeout_s=0.2), 0)
    until(lambda: writer.hangs)
    assert "storage hangs, nothing was written by rank 0 on " in writer.hanging()
    assert f"for 0.2 s (checkpoint.timeout_s); earlier checkpoints are untouched: check the file system of {root}" in (
        writer.hanging()
    )
    writer.abandon()
    hanging.set()
    assert writer.join(60)
    assert writer.path is None
    assert names(root) == []


def test_a_rank_of_which_nothing_is_seen_is_named(root):
    writer = start(order(root, timeout_s=0.2), 0)
    assert writer.join(60)
    assert "was given up: rank 1 wrote nothing that " in str(writer.error)
    assert "its storage hangs, or is not the " in str(writer.error)
    assert names(root) == []


@pytest.fixture
def small(tmp_path):
    """A file system of 3 MiB, where this process may mount one."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_fills_while_it_is_written_says_what_there_is_and_what_to_do(small, monkeypatch):
    root = small / "run" / "checkpoints"
    save_tensors(root, 1, {"w": W}, {})
    monkeypatch.setattr(saves, "_require_space", lambda *_: None)
    with pytest.raises(RunError) as caught:
        save_tensors(root, 2, {"w": torch.zeros(2**20)}, {})
    message = str(caught.value)
    assert ", which writes 4.0MiB: [Errno 28] No space left on device (" in message
    assert message.endswith(
        "B are free); earlier checkpoints are untouched: free some space, lower checkpoint.keep, or choose another "
        "run.dir"
    )
    assert names(root) == ["step-000001"]


def test_too_little_space_for_all_that_is_kept_is_told_at_the_first_checkpoint(root, monkeypatch, caplog):
    free = 10 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    for step in (1, 2):
        assert saves.Save.begin(root, step, 1, 4 * 2**20, retention=Retention(keep=2))
        (root / "step-000001").mkdir(exist_ok=True)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "has 10.0MiB free, and checkpoint.keep=2 needs 12.0MiB: 3 × 4.0MiB" in messages[0]


def test_a_pointer_that_cannot_be_moved_does_not_fail_a_whole_checkpoint(root, caplog):
    (root.parent / "latest").mkdir(parents=True)
    path = save_tensors(root, 1, {"w": W}, {})
    check(path)
    assert f"checkpoint {path} is whole, but the pointer" in caplog.text


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o664, 0o775)])
def test_modes_follow_the_umask_and_nothing_may_be_written_by_everybody(root, umask, file, folder):
    before = os.umask(umask)
    try:
        path = save_tensors(root, 1, {"w": W}, {})
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (root.parent / "latest", path, *path.iterdir())}
    expected = dict.fromkeys(modes, file) | {path.name: folder}
    assert modes == expected


def test_a_snapshot_uses_its_memory_again_and_keeps_values_and_types():
    values = [torch.ones(3, dtype=torch.bfloat16), torch.arange(5.0, dtype=torch.float64), torch.ones(0)]
    snapshot = Snapshot(torch.device("cpu"))
    for _ in range(2):
        copies = snapshot.take(values)
        place = snapshot.memory.data_ptr()
        snapshot.begin()
        snapshot.wait(2)
        snapshot.hold()
        for copy, value in zip(copies, values, strict=True):
            torch.testing.assert_close(copy, value, rtol=0, atol=0)
        values = [value + 1 for value in values]
    assert snapshot.memory.data_ptr() == place
    with pytest.raises(MemoryError):
        snapshot.take([torch.empty(1, device="meta").expand(2**60)])


ENDS = """
import os, signal, sys, threading
from pathlib import Path
from checkpoint.test_background import order, start, until
from phalanx.checkpoint import shard_file

def in_a_child(work):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    work()
    sys.exit(0)

def hangs(root):
    shard_file.open_regular = lambda path, flags: (os.mkfifo(path), os.open(path, os.O_WRONLY))[1]
    writer = start(order(root, 20, ranks=1, timeout_s=0.2), 0)
    until(lambda: writer.hangs)

def killed(root):
    shard_file.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    [start(order(root, 20), rank) for rank in (0, 1)]
    threading.Event().wait()

def good(root):
    assert all(each.join(60) for each in [start(order(root, 10), rank) for rank in (0, 1)])

for work in (hangs, killed):
    root = Path(sys.argv[1]) / work.__name__
    print(in_a_child(lambda: good(root)), in_a_child(lambda: work(root)))
"""


def test_a_process_ends_while_its_thread_hangs_in_a_fifo_or_is_killed_while_it_writes(tmp_path):
    done = subprocess.run(
        [*as_file(tmp_path, ENDS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])},
        check=False,
    )
    assert done.stdout.split() == ["0", "0", "0", str(-signal.SIGKILL)], done.stderr
    for root in (tmp_path / "hangs", tmp_path / "killed"):
        check(root / "step-000010")
        assert [name for name in names(root) if not name.startswith(".")] == ["step-000010"]
        save_tensors(root, 30, {"w": W}, {})
        assert names(root) == ["step-000010", "step-000030"]
