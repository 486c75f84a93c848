"""The newest state of a run in the memory of its nodes, held by their launchers: it outlives ranks, and any one node.

    FOLDER/own/step-000020-4-TOKEN/rank-00003.safetensors, .json    a part: what rank 3 of 4 wrote, its report last
    FOLDER/own/step-000020-4-TOKEN/rank-00003.copied                the next node has a copy
    FOLDER/copies/step-000020-4-TOKEN/...                           parts of the node before this one

The nodes of a round are a ring. Each launcher asks the one before it several times a second for its parts, and copies
those that are new (Wang et al. 2023, "Gemini: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints"). Ranks that resume fetch what their own node lacks. A request is a line of JSON with the key of the run,
the answer a line of JSON and the bytes of a part; digests are checked, and nothing that arrives is executed.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import xxhash

from phalanx.bounded import MOST_BYTES, field, parse_json, read_bytes
from phalanx.errors import RunError
from phalanx.launch.hosts import address_towards
from phalanx.launch.ranks import MEMORY
from phalanx.units import gib

PART = re.compile(r"step-([0-9]{6,12})-([1-9][0-9]{0,6})-[0-9a-f]{16}/rank-([0-9]{5,7})")
"""The name of a part: step, ranks, and the rank that wrote it."""
SHARD, REPORT, COPIED = ".safetensors", ".json", ".copied"
_CHUNK_BYTES = 2**22
_POLL_S, _RETRY_S = 0.1, 0.5
_LISTED = 1 << 20  # bytes of a line that lists parts


def parts_in(folder: Path) -> list[str]:
    """Returns the names of the parts in a folder."""
    names = (f"{path.parent.name}/{path.stem}" for path in folder.glob(f"*/rank-*{REPORT}"))
    return sorted(name for name in names if PART.fullmatch(name))


@contextmanager
def _answer(address: str, key: str, seconds: float, **request: Any) -> Iterator[tuple[dict[str, Any], BufferedIOBase]]:
    """Sends a request to the launcher at HOST:PORT; gives the line of its answer, and what follows."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(json.dumps({"key": key, **request}).encode() + b"\n")
        answer = connection.makefile("rb")
        line = answer.readline(_LISTED)
        if not line:
            raise ConnectionResetError(f"{address} does not answer")
        yield parse_json(line), answer


def fetch_report(address: str, key: str, part: str, seconds: float) -> bytes:
    """Returns the report of a part. Raises OSError and ValueError."""
    with _answer(address, key, seconds, part=part, shard=False) as (sizes, answer):
        return _exactly(answer, field(sizes, "report", int), MOST_BYTES)


def fetch(address: str, key: str, part: str, folder: Path, seconds: float) -> None:
    """Copies a part from a launcher to a folder, and checks its digest. Raises OSError and ValueError."""
    with _answer(address, key, seconds, part=part, shard=True) as (sizes, answer):
        content = _exactly(answer, field(sizes, "report", int), MOST_BYTES)
        target, report, left = folder / part, parse_json(content), field(sizes, "shard", int)
        if left != report.get("bytes", 0):
            raise ValueError(f"{part} has {left} bytes, its report says {report.get('bytes')}")
        if left > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{part} has {gib(left)}, and {folder} has {gib(free)} free")
        target.parent.mkdir(exist_ok=True)
        temporary, digest = target.with_suffix(f".{threading.get_native_id()}"), xxhash.xxh3_128()
        if left:
            try:
                with temporary.open("wb") as file:
                    while left:
                        chunk = _exactly(answer, min(left, _CHUNK_BYTES), _CHUNK_BYTES)
                        digest.update(chunk)
                        file.write(chunk)
                        left -= len(chunk)
                if digest.hexdigest() != report["xxh3_128"]:
                    raise ValueError(f"{part} does not match its digest")
                temporary.replace(target.with_suffix(SHARD))
            finally:
                temporary.unlink(missing_ok=True)
        temporary.write_bytes(content)
        temporary.replace(target.with_suffix(REPORT))


def _exactly(stream: BufferedIOBase, size: int, most: int) -> bytes:
    if not 0 <= size <= most:
        raise ValueError(f"{size} bytes, the most is {most}")
    content = stream.read(size)
    if len(content) < size:
        raise ConnectionResetError("the connection ended in the middle of a part")
    return content


class StateMemory:
    """One node's memory for the state, in a folder of its launcher, which removes it. A context manager.

    `towards` is the host of a run of several nodes, `key` returns the run's; without `towards` there is one node, and
    nothing listens. `tell` prints a line."""

    def __init__(
        self, folder: Path, towards: str, key: Callable[[], str], silence_s: float, tell: Callable[[str], None]
    ):
        """Raises RunError if the folder is not in memory, or no address leads to the host."""
        if not folder.is_relative_to("/dev/shm"):
            raise RunError(
                "checkpoint.memory_every keeps the state in /dev/shm, which this user cannot write, or which is full: "
                "make room there (in a container: docker run --shm-size), or set checkpoint.memory_every=0"
            )
        self.folder, self.key, self.silence_s, self.tell = folder, key, silence_s, tell
        for name in ("own", "copies"):
            (folder / name).mkdir(parents=True)
        self.address, self._server, self._before, self._closed = "", None, "", threading.Event()
        if towards:
            own = address_towards(towards)
            if not own:
                raise RunError(f"checkpoint.memory_every: no IPv4 address of this machine leads to {towards}")
            self._server = _PartServer((own, 0), self)
            self.address = f"{own}:{self._server.server_address[1]}"
            for work in (self._server.serve_forever, self._copy_neighbour):
                threading.Thread(target=work, name="phalanx-memory", daemon=True).start()

    def __enter__(self) -> StateMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def variables(self, ring: tuple[str, ...] = (), place: int = 0) -> dict[str, str]:
        """Returns variables for the ranks of an attempt whose nodes have these addresses; this one is at `place`. From
        now on the node before it is copied."""
        self._before = ring[place - 1] if len(ring) > 1 else ""
        return {MEMORY: json.dumps({"folder": str(self.folder), "nodes": ring, "place": place})}

    def _copy_neighbour(self) -> None:
        """Copies the parts of the node before this one, each once, and tells that node which it has."""
        seen, failed = set[str](), ""
        while not self._closed.wait(_POLL_S):
            address = self._before
            if not address:
                continue
            try:
                copied = self._parts()
                with _answer(address, self.key(), self.silence_s, copied=copied) as (answer, _):
                    parts = field(answer, "parts", list)
                for part in parts:
                    if isinstance(part, str) and PART.fullmatch(part) and part not in seen and part not in copied:
                        fetch(address, self.key(), part, self.folder / "copies", self.silence_s)
                        seen.add(part)
            except (OSError, ValueError, KeyError) as error:
                # A node that is gone ends the round; a part may have given way to a newer one.
                if str(error) != failed and not isinstance(error, (ConnectionError, TimeoutError, FileNotFoundError)):
                    failed = str(error)
                    self.tell(f"the state of the node at {address} was not copied: {failed}")
                self._closed.wait(_RETRY_S)

    def _parts(self) -> list[str]:
        return [*parts_in(self.folder / "copies"), *parts_in(self.folder / "own")]

    def mark(self, copied: list[Any]) -> None:
        """Notes which parts the next node has."""
        own = set(parts_in(self.folder / "own"))
        for part in copied:
            if part in own:
                with suppress(OSError):
                    (self.folder / "own" / part).with_suffix(COPIED).touch()


class QuietServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]):
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whatever a stranger sends, or however a connection breaks, the run goes on."""


class _PartServer(QuietServer):
    def __init__(self, address: tuple[str, int], memory: StateMemory):
        self.memory = memory
        super().__init__(address, _PartRequest)


class _PartRequest(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Answers one request that shows the key; ends the connection of any other."""
        server = self.server
        assert isinstance(server, _PartServer)
        memory = server.memory
        self.request.settimeout(memory.silence_s)
        request = parse_json(self.rfile.readline(_LISTED))
        key = memory.key()
        if not key or not hmac.compare_digest(field(request, "key", str).encode(), key.encode()):
            return
        if "copied" in request:
            memory.mark(field(request, "copied", list))
            self._say({"parts": parts_in(memory.folder / "own")})
            return
        part = field(request, "part", str)
        if not PART.fullmatch(part):
            return
        places = [memory.folder / name / part for name in ("own", "copies")]
        place = next(path for path in places if path.with_suffix(REPORT).exists())
        report, shard = read_bytes(place.with_suffix(REPORT)), place.with_suffix(SHARD)
        with open(shard if shard.exists() else os.devnull, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._say({"report": len(report), "shard": size})
            self.wfile.write(report)
            if size and request.get("shard") is True:
                self.request.sendfile(file)

    def _say(self, line: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(line).encode() + b"\n")
