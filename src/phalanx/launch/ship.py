"""A folder, such as a Python environment, on the local disk of every host: `--ship FOLDER:TO`.

Thousands of processes that import from one shared file system wait for it. Here one copy leaves it: this machine sends
the folder to the first host, and in each round every host that has it sends it to one that has not, so n hosts take
1 + ceil(log2 n) copies one after the other (the idea of ezpz's yeet-env). Hosts reach each other by the remote shell.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import JobError, RunError
from phalanx.units import listed

MARK = ".phalanx-shipped"
"""A file in every copy."""


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns the copies of each round as (sender, receiver), in which "" is this machine."""
    if not hosts:
        return []
    found, have, left = [[("", hosts[0])]], [hosts[0]], list(hosts[1:])
    while left:
        pairs = list(zip(have, left, strict=False))
        found.append(pairs)
        have += [receiver for _, receiver in pairs]
        left = left[len(pairs) :]
    return found


def parse(text: str) -> tuple[Path, Path]:
    """Returns the folder and its place on the hosts of FOLDER:TO. Raises JobError for what is none."""
    folder, _, to = text.rpartition(":")
    if not folder or not os.path.isabs(to) or len(Path(to).parts) < 3:
        raise JobError(f"--ship {text}: expected FOLDER:TO, with an absolute path on local disks, as .venv:/tmp/me/env")
    source = Path(os.path.abspath(os.path.expanduser(folder)))
    if not source.is_dir():
        raise JobError(f"--ship {text}: there is no folder {source}")
    return source, Path(os.path.normpath(to))


def copy_words(sender: str, receiver: str, source: Path, to: Path, shell: Sequence[str]) -> list[str]:
    """Returns the command that copies the folder, to be run here. It appears under its name when it is whole. An older
    copy is replaced, and nothing else that is there: a mark tells them apart."""
    part, there, folder = shlex.quote(f"{to}.part"), shlex.quote(str(to)), source if not sender else to
    other = shlex.quote(f"{to} is there, and is no copy that --ship has made: remove it, or choose another place")
    take = f"if [ -e {there} ] && [ ! -e {there}/{MARK} ]; then cat > /dev/null; echo {other} >&2; exit 1; fi; "
    take += f"rm -rf {part} && mkdir -p {part} && tar -C {part} -xf - && touch {part}/{MARK} && "
    take += f"rm -rf {there} && mv {part} {there}"
    send = f"set -o pipefail; tar -C {shlex.quote(str(folder))} -cf - . | {shlex.join([*shell, receiver, take])}"
    inside = ["bash", "-c", send]
    return [*shell, sender, shlex.join(inside)] if sender else inside


def ship(source: Path, to: Path, hosts: Sequence[str], shell: Sequence[str]) -> None:
    """Copies the folder to all hosts. Raises RunError with every host that a copy did not reach."""
    for pairs in rounds(hosts):
        commands = [copy_words(*pair, source, to, shell) for pair in pairs]
        running = [
            (pair, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE))
            for pair, command in zip(pairs, commands, strict=True)
        ]
        failed = []
        for (sender, receiver), process in running:
            errors = process.communicate()[1].decode(errors="replace").strip()
            if process.returncode:
                reason = errors.splitlines()[-1] if errors else f"exit code {process.returncode}"
                failed.append(f"{sender or 'here'} → {receiver}: {reason}")
        if failed:
            raise RunError(f"--ship: {source} did not reach {len(failed)} hosts: {listed(failed, 4)}")


def interpreter(python: str, source: Path, to: Path) -> str:
    """Returns the interpreter on the hosts: its copy, if it lies in the folder."""
    return str(to / Path(python).relative_to(source)) if Path(python).is_relative_to(source) else python
