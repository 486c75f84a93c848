"""Checkpoints on an object store: how fast they are uploaded and fetched, beside the store's library alone.

    python -m benchmarks.remote [--url s3://BUCKET/PREFIX] [--megabytes 512] [--rounds 5] [--ranks 2]

Without a URL the store is moto's S3 server, in a process of its own on loopback: what is measured then is that server
and the processor, which all of them share. Every round moves the same bytes three times: up with s3fs's put_file, one
thread per file; up as a run does it (`checkpoint/writer.py`, one thread per rank), until the checkpoint is committed;
and down with the digests checked, as a run on an empty machine fetches it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.report import machine, save
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.remote import RemoteCheckpoints
from phalanx.checkpoint.save import KEEP_ALL, Save
from phalanx.checkpoint.writer import Mirror, Upload
from phalanx.units import seconds as as_time


def measure(url: str, path: Path, ranks: int) -> dict[str, float]:
    """Returns the seconds of one round."""
    run = f"benchmark-{secrets.token_hex(4)}"
    remote = RemoteCheckpoints.of(url, run)
    shards = sorted(path.glob("*.safetensors"))

    def library() -> None:
        _together([lambda shard=shard: remote.store.upload(shard, f"plain/{shard.name}", _ignore) for shard in shards])

    def uploaded() -> None:
        upload = Upload(path, 1, secrets.token_hex(8), KEEP_ALL)
        mirrors = [Mirror(url, run, path.parent, rank, ranks, 300.0) for rank in range(ranks)]
        for mirror in mirrors:
            mirror.offer(upload)
        while any(mirror.busy for mirror in mirrors):
            time.sleep(0.005)

    def fetched() -> None:
        record = remote.newest(None, -1, print)
        assert record is not None
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            names = [name for name in remote.store.sizes() if name.startswith(record.folder)]
            targets = [Path(folder) / name.rpartition("/")[2] for name in names]
            pairs = zip(names, targets, strict=True)
            _together([lambda n=name, t=target: remote.store.download(n, t, _ignore) for name, target in pairs])
            check(Path(folder))

    turns = {"s3fs alone": library, "upload": uploaded, "fetch": fetched}
    seconds = {name: _timed(turn) for name, turn in turns.items()}
    remote.store.remove(remote.store.sizes())
    return seconds


def _ignore() -> None:
    pass


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _together(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write(root: Path, megabytes: int, ranks: int) -> Path:
    """Writes a checkpoint of random bytes, an equal share by each rank, and returns its path."""
    columns = megabytes * 10**6 // 4 // ranks
    checkpoint = Save.begin(root, 1, ranks, 4 * columns * ranks)
    assert checkpoint is not None
    for rank in range(ranks):
        checkpoint.write(rank, [Part("w", (ranks, columns), Box((rank, 0), (1, columns)), torch.randn(1, columns))])
    return checkpoint.commit({}, KEEP_ALL)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.remote", description=__doc__)
    parser.add_argument("--url", default="")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        url = options.url
        if not url:
            from tests.checkpoint.s3 import serving

            os.environ.update(held.enter_context(serving(folder)))
            url = "s3://bucket"
        path = write(folder / "run" / "checkpoints", options.megabytes, options.ranks)
        rounds = [measure(url, path, options.ranks) for _ in range(options.rounds + 1)][1:]
    size = options.megabytes * 1e6
    medians = {name: statistics.median(turn[name] for turn in rounds) for name in rounds[0]}
    table = [("what", "median", "MB/s")]
    table += [(name, as_time(took), f"{size / 1e6 / took:,.0f}") for name, took in medians.items()]
    ratio = statistics.median(turn["s3fs alone"] / turn["upload"] for turn in rounds)
    seen = (
        f"{options.megabytes} MB in {options.ranks} files, medians of {options.rounds} rounds on "
        f"{options.url or 'an S3 server of moto on this machine'}; load of the machine {os.getloadavg()[1]:.1f}. An "
        f"upload with its commit reaches {ratio:.2f} of the speed of the library alone."
    )
    result = {"machine": machine(), "seconds": medians, "rounds": rounds, "bytes": size, "of_library": ratio}
    save("remote", result, table, "Checkpoints on an object store", seen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
