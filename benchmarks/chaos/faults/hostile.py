"""Class 25: inputs made to run code, to write elsewhere, to exhaust the machine, or to learn a secret."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos import processes
from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.moments import at_step
from benchmarks.chaos.live import Live
from benchmarks.chaos.story import Story

_REFUSED = frozenset({1, 2, 4})
_LINKED = ("metrics.jsonl", "config.yaml", "command.txt", "env.json", "latest", "tokenizer.json", ".lock")


def _canary(arena: Arena) -> Path:
    """Returns the file that hostile code would write."""
    return arena.tmp.parent / "canary"


def _nothing_ran(arena: Arena, story: Story) -> Sequence[str]:
    return ["code of the input ran"] if _canary(arena).exists() else []


class _Bomb:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def _pickles(arena: Arena) -> None:
    bomb = pickle.dumps(_Bomb(_canary(arena)))
    newest = arena.newest()
    for file in [*newest.rglob("*.safetensors"), newest / ".metadata", newest / "__0_0.distcp"]:
        file.write_bytes(bomb)


def _outside(arena: Arena) -> None:
    """Makes the newest checkpoint's manifest name files outside of it, with a digest that fits."""
    path = arena.newest() / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("digest", None)
    text = json.dumps(manifest).replace('.safetensors"', '.safetensors/../../../../../canary"')
    manifest = json.loads(text)
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def _job(name: str, what: str, text: Callable[[Arena], str], **fields: Any) -> Fault:
    def prepare(arena: Arena) -> None:
        arena.job_text = text(arena)

    return Fault(
        25, name, what, "refused with one message; nothing runs, nothing is written", prepare=prepare,
        repair=Arena.forget, stops=True, codes=_REFUSED, names=r"job\.yaml", check=_nothing_ran, limit_s=30, **fields,
    )  # fmt: skip


def _modules(arena: Arena) -> None:
    """Puts modules into the current directory that would be imported by their names."""
    code = f"open({str(_canary(arena))!r}, 'a').write(__name__)\nraise SystemExit('a module of the folder ran')\n"
    for name in ("yaml", "numpy", "torch", "json", "safetensors", "rich", "sitecustomize", "usercustomize"):
        (arena.folder / f"{name}.py").write_text(code)


def _links(arena: Arena) -> None:
    """Replaces files of the run by links to somebody else's files."""
    victims = arena.tmp.parent / "victims"
    victims.mkdir()
    for name in _LINKED:
        (victims / name).write_text("precious\n")
        (arena.run / name).unlink(missing_ok=True)
        (arena.run / name).symlink_to(victims / name)


def _unlink(arena: Arena) -> None:
    for name in _LINKED:
        if (arena.run / name).is_symlink():
            (arena.run / name).unlink()


def _not_followed(arena: Arena, story: Story) -> Sequence[str]:
    victims = arena.tmp.parent / "victims"
    written = [path.name for path in victims.iterdir() if path.read_text() != "precious\n"]
    return [f"written through a planted link: {', '.join(sorted(written))}"] if written else []


def _escaped(arena: Arena, story: Story) -> Sequence[str]:
    root = arena.tmp.parent
    return ["a run directory outside of run.dir was made"] if (root / "escaped").exists() else []


def _garbage(live: Live) -> None:
    """Connects to every port of the run and sends what no protocol expects."""
    pids = [process.pid for process in processes.marked(live.mark)]
    live.open_ports = sorted(processes.listening(pids))
    for _address, port in live.open_ports:
        for message in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff" * 64, b""):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(message)


def _only_loopback(arena: Arena, story: Story) -> Sequence[str]:
    return [f"port {port} listens on all interfaces" for address, port in arena.lives[0].open_ports
            if not processes.is_loopback(address)]  # fmt: skip


def _secret(arena: Arena) -> None:
    secret = uuid.uuid4().hex
    arena.env |= dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "NCCL_SECRET_TOKEN"), secret)


def _secret_kept(arena: Arena, story: Story) -> Sequence[str]:
    secret = arena.env["HF_TOKEN"]
    found = [str(path.relative_to(arena.run)) for path in arena.run.rglob("*")
             if path.is_file() and secret.encode() in path.read_bytes()]  # fmt: skip
    found += ["the output"] if secret in story.first.output else []
    return [f"a secret of the environment is in {', '.join(found)}"] if found else []


FAULTS = (
    Fault(
        25, "pickle-checkpoint", "the newest checkpoint's files are pickles that run a command",
        "nothing runs; the checkpoint before it is used", start="half", prepare=_pickles, damages=True,
        names=r"step-\d+", codes=_REFUSED, check=_nothing_ran, quick=True,
    ),
    Fault(
        25, "manifest-outside", "the newest checkpoint's manifest names files outside of its directory",
        "refused; the checkpoint before it is used", start="half", prepare=_outside, damages=True,
        names=r"step-\d+", codes=_REFUSED, check=_nothing_ran,
    ),
    _job("yaml-tag", "a tag in the job that would run a command",
         lambda arena: f'run: !!python/object/apply:os.system ["touch {_canary(arena)}"]\n'),
    _job("yaml-depth", "a job of 100,000 brackets", lambda arena: "[" * 100_000),
    _job("yaml-keys", "a job of 100,000 unknown keys", lambda arena: "".join(f"k{n}: 1\n" for n in range(100_000))),
    Fault(
        25, "modules", "modules named yaml, numpy, torch, ... lie in the current directory", "none of them runs",
        prepare=_modules, check=_nothing_ran,
    ),
    Fault(
        25, "run-name", "run.name=../../escaped", "refused: a name is one component of a path",
        extra={"run.name": "../../escaped"}, repair=Arena.forget, stops=True, codes=frozenset({2}),
        names=r"run\.name", check=_escaped,
    ),
    Fault(
        25, "planted-links", "files of the run directory are links to somebody else's files",
        "not followed: refused, or replaced", start="half", prepare=_links, repair=_unlink, stops=True, codes=_REFUSED,
        names=r"(?i)link", check=_not_followed,
    ),
    Fault(
        25, "garbage", "garbage is sent to every open port of the run", "the run goes on; ports are on loopback only",
        during=at_step(_garbage, 5), check=_only_loopback,
    ),
    Fault(
        25, "secret", "secrets lie in the environment", "they are in no file of the run and not in its output",
        prepare=_secret, check=_secret_kept,
    ),
)  # fmt: skip
