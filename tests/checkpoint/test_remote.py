"""Checkpoints on an object store: who commits, what is visible, what is kept, and every way in which a store fails."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from checkpoint.contents import save_tensors
from checkpoint.s3 import serving
from phalanx.check.job import problems_of
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.inventory import Retention, check
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.remote import (
    CommitRecord,
    ObjectStore,
    RemoteCheckpoints,
    folder_of,
    manifest_of,
    with_patience,
)
from phalanx.checkpoint.save import Save
from phalanx.checkpoint.writer import Mirror, Upload
from phalanx.config.fields import replace
from phalanx.config.job import Job
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, RunError
from warm import as_file

W = torch.arange(6.0)
WRITERS = 8


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path, monkeypatch):
    """A place of its own on a mounted disk, and on an S3 server."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def local(root, step, loss=None):
    """A checkpoint on the disk."""
    return save_tensors(root, step, {"w": W + step}, {"val_loss": loss, "val_step": step})


def of_two_ranks(root, step):
    """A checkpoint on the disk in two files, each with a row of w."""
    save = Save.begin(root, step, 2, 0)
    for rank in (0, 1):
        save.write(rank, [Part("w", (2, 6), Box((rank, 0), (1, 6)), W.view(1, 6) + rank)])
    return save.commit({}, Retention())


def uploaded(remote, path, token="0" * 16):
    """The commit record of a local checkpoint whose objects are all on the store."""
    manifest, folder = manifests.read(path), folder_of(manifests.read(path).step, token)
    for file in path.iterdir():
        remote.store.upload(file, f"{folder}/{file.name}", lambda: None)
    return CommitRecord.of(manifest, folder, (path / "manifest.json").stat().st_size)


def mirror(url, root, rank=0, ranks=1, timeout_s=60.0):
    return Mirror(url, "run", root, rank, ranks, timeout_s)


def upload(path, token="1" * 16):
    return Upload(path, manifests.read(path).step, token, Retention())


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names(remote):
    return sorted(remote.store.sizes())


def test_exactly_one_of_many_writers_commits_and_the_objects_of_the_others_are_deleted(url, root):
    path = local(root, 10)
    remotes = [RemoteCheckpoints.of(url, "run") for _ in range(WRITERS)]
    remotes[0].store.require_put_if_absent()
    records = [uploaded(remote, path, f"{number:016x}") for number, remote in enumerate(remotes)]
    together = threading.Barrier(WRITERS, timeout=60)

    def commit(number):
        together.wait()
        return remotes[number].commit(records[number])

    with ThreadPoolExecutor(WRITERS) as pool:
        committed = list(pool.map(commit, range(WRITERS)))
    assert committed.count(True) == 1
    winner = records[committed.index(True)]
    assert remotes[0].newest(None, -1, pytest.fail) == winner
    assert {name.partition("/")[0] for name in names(remotes[0])} == {winner.name, winner.folder}
    assert remotes[0].commit(winner), "a library that repeats a request is no other writer"


def test_what_has_no_commit_record_is_invisible_and_what_lost_an_object_is_passed_over(url, root):
    remote, reports = RemoteCheckpoints.of(url, "run"), []
    for step in (10, 20):
        assert remote.commit(uploaded(remote, local(root, step)))
    uploaded(remote, local(root, 30))
    assert remote.steps() == [20, 10]
    record = remote.newest(None, -1, pytest.fail)
    assert record.step == 20
    assert remote.newest(None, 20, pytest.fail) is None
    remote.store.remove([manifest_of(record)])
    assert remote.newest(None, -1, reports.append).step == 10
    assert reports == [
        f"checkpoint {url}/run/step-000020.json has 2 objects with {record.bytes} bytes; in {record.folder}/ are 1 "
        f"with {record.bytes - (root / 'step-000020' / 'manifest.json').stat().st_size}; trying the one before it"
    ]
    with pytest.raises(DamagedCheckpointError, match="does not hold what was written to it"):
        remote.commit(record)
    again = uploaded(remote, root / "step-000020", "f" * 16)
    assert remote.commit(again), "a damaged checkpoint gives way"
    assert remote.newest(None, -1, pytest.fail) == again


def test_checkpoints_on_a_store_are_kept_as_on_a_disk(root, tmp_path):
    remote, policy = RemoteCheckpoints.of(f"file://{tmp_path}/store", "run"), Retention(2, 40, keep_best=True)
    left = uploaded(remote, local(root, 5), "f" * 16).folder  # of an interrupted upload
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0), (60, 2.0)):
        assert remote.commit(uploaded(remote, local(root, step, loss)))
        remote.remove_expired(policy)
        assert any(name.startswith(left) for name in names(remote)) == (step == 10)
    assert remote.steps() == [60, 50, 40, 20]
    assert len(names(remote)) == 4 * 3
    folders = [entry.name for entry in (tmp_path / "store" / "run").iterdir() if entry.is_dir()]
    assert len(folders) == 4


def test_a_store_that_replaces_objects_is_refused():
    class Replacing(ObjectStore):
        def put_if_absent(self, name, content):
            self.fs.pipe_file(self._path(name), content)
            return True

    with pytest.raises(JobError, match="cannot write an object only if it is absent, so two runs could both commit"):
        Replacing("memory://replacing", "run").require_put_if_absent()
    ObjectStore("memory://refusing", "run").require_put_if_absent()
    with pytest.raises(JobError, match="Protocol not known: nowhere; for S3: pip install 'phalanx"):
        ObjectStore("nowhere://there", "run")


def test_ranks_upload_together_and_what_has_not_begun_is_superseded(root, tmp_path, caplog):
    caplog.set_level(logging.INFO, "phalanx")
    url = f"file://{tmp_path}/store"
    first, second = mirror(url, root, 0, 2), mirror(url, root, 1, 2)
    one, two, three = (upload(of_two_ranks(root, step), f"{step:016x}") for step in (1, 2, 3))
    first.offer(one)
    until(one.reports.is_dir)  # and now rank 0 waits for rank 1
    assert first.withdraw() == one.token
    first.offer(two)
    second.offer(two)
    second.keep_only(first.withdraw())
    for each in (first, second):
        each.offer(three)
    assert first.queue == second.queue == [three]
    with second._changed:
        second.queue.insert(0, one)
    until(lambda: not (first.busy or second.busy))
    remote = RemoteCheckpoints.of(url, "run")
    assert remote.steps() == [3, 1]
    assert "step: 2  not uploaded: the upload of an earlier checkpoint still goes on" in caplog.text
    assert not list(root.glob(".*"))


def test_a_rank_whose_store_refuses_is_named_and_nothing_of_its_checkpoint_stays(root, tmp_path, caplog, monkeypatch):
    url, put = f"file://{tmp_path}/store", ObjectStore.upload

    def refuse(store, path, name, progress):
        if threading.current_thread() is second._thread:
            raise store._failure(f"{name} could not be written", PermissionError("Access Denied"))
        put(store, path, name, progress)

    monkeypatch.setattr(ObjectStore, "upload", refuse)
    first, second = mirror(url, root, 0, 2), mirror(url, root, 1, 2)
    save = upload(of_two_ranks(root, 1))
    for each in (first, second):
        each.offer(save)
    until(lambda: not first.busy)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"checkpoint {save.path} was not uploaded: rank 1 on ")
    assert message.endswith("could not be written: PermissionError: Access Denied; the local one is whole")
    assert names(RemoteCheckpoints.of(url, "run")) == []


def test_a_store_that_hangs_is_named_once_and_commits_nothing_later(root, tmp_path, caplog, monkeypatch):
    url, goes_on, put = f"file://{tmp_path}/store", threading.Event(), ObjectStore.upload

    def hang(*arguments):
        goes_on.wait()
        put(*arguments)

    monkeypatch.setattr(ObjectStore, "upload", hang)
    hanging = mirror(url, root, timeout_s=0.2)
    hanging.offer(upload(local(root, 1)))
    until(lambda: hanging.poll() or caplog.records)
    hanging.poll()
    assert not hanging.busy
    goes_on.set()
    until(lambda: hanging.current is None)
    [message] = [record.getMessage() for record in caplog.records]
    assert f"was not uploaded: {url} hangs: no progress for 0.2 s (checkpoint.timeout_s)" in message
    assert RemoteCheckpoints.of(url, "run").steps() == []
    hanging.offer(upload(local(root, 2), "2" * 16))
    until(lambda: not hanging.busy)
    assert RemoteCheckpoints.of(url, "run").steps() == [2]
    with pytest.raises(RunError, match="there: hangs: no progress for 0.1 s"):
        with_patience(0.1, "there", lambda _: threading.Event().wait())


KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoint.test_remote import local, uploaded
from phalanx.checkpoint.remote import RemoteCheckpoints
from phalanx.checkpoint.remote import ObjectStore

url, root, left = sys.argv[1], Path(sys.argv[2]), [int(sys.argv[3])]
put = ObjectStore.upload

def upload(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    put(*arguments)

ObjectStore.upload = upload
remote = RemoteCheckpoints.of(url, "run")
ObjectStore.put_if_absent = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
remote.commit(uploaded(remote, root / "step-000010"))
"""


def test_a_process_that_is_killed_between_uploads_leaves_nothing_visible(url, root, tmp_path):
    local(root, 10)
    remote = RemoteCheckpoints.of(url, "run")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    uploads = 1 if url.startswith("file") else 2  # after the first object, or before the commit record
    command = [*as_file(tmp_path, KILLED), url, str(root), str(uploads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == -9, done.stderr
    assert len(names(remote)) == uploads
    assert remote.steps() == []
    assert remote.commit(uploaded(remote, root / "step-000010", "f" * 16))
    assert remote.newest(None, -1, pytest.fail).folder.endswith("f" * 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "'format' is null"),
        (b"[" * 99, "is damaged: "),
        (b" " * 2**17, "is damaged: it is larger than 65536 bytes"),
        ({"folder": "../x"}, "is damaged: it does not name a folder of step 10"),
        ({"folder": folder_of(20, "0" * 16)}, "is damaged: it does not name a folder of step 10"),
        ({"objects": True}, "is damaged: 'objects' is true or false, expected a whole number"),
        ({"version": 2}, "the commit record of step 10 has version 2; this program reads 1"),
    ],
)
def test_a_commit_record_of_another_kind_is_refused(tmp_path, content, message):
    remote = RemoteCheckpoints.of(f"file://{tmp_path}", "run")
    record = CommitRecord(10, folder_of(10, "0" * 16), 1, 1, None)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(record.text()), **content}).encode()
    remote.store.put_if_absent(record.name, content)
    with pytest.raises(CheckpointError, match=message):
        remote.find(10)


def test_a_download_is_the_checkpoint(url, root, tmp_path):
    remote = RemoteCheckpoints.of(url, "run")
    record = uploaded(remote, local(root, 10))
    target = tmp_path / "step-000010"
    target.mkdir()
    for name in remote.store.sizes():
        remote.store.download(name, target / name.rpartition("/")[2], lambda: None)
    assert check(target).step == record.step
    with pytest.raises(FileNotFoundError):
        remote.store.download("absent", tmp_path / "absent", lambda: None)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("s3://key:secret@bucket/runs", "must not hold credentials"),
        ("s3://key%3Asecret@bucket/runs", "must not hold credentials"),
        ("sftp://secret@host/runs", "must not hold credentials"),
        ("/mnt/runs", "must be the URL of a place on a store, such as s3://BUCKET/PREFIX"),
        ("s3://", "must be the URL of a place on a store"),
        ("s3://bucket/runs?X-Amz-Signature=secret", "must be the plain URL"),
        ("simplecache::s3://bucket", "must be the URL of a place"),
        ("abfs://container@account.dfs.core.windows.net/runs", ""),
        ("s3://bucket/a/b", ""),
    ],
)
def test_a_url_is_plain_and_holds_no_credentials(value, problem):
    found = dict(problems_of(replace(Job(), "checkpoint.remote", value))).get("checkpoint.remote", "")
    assert found.startswith(problem) if problem else not found
    assert "secret" not in found
