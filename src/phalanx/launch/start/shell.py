"""Commands without a scheduler: on this host, or on each of several through ssh or a program like it."""

from __future__ import annotations

import shlex

from phalanx.launch.start.command import HostCommand, StartRequest, node_words

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"
"""Never asks for a password: ten hosts would ask at once."""


def local(request: StartRequest) -> HostCommand:
    """Returns the command on this host: train starts its own ranks."""
    words = node_words(request)
    if request.ranks_by == "phalanx" and not request.stop_after_s:
        words = (request.python, "-P", "-m", "phalanx", "train", *request.words)
    return HostCommand(words)


def remote(request: StartRequest) -> list[HostCommand]:
    """Returns one command for each host. What runs there is one word for the host's shell, as with ssh."""
    names, found = request.exported.secrets, []
    for host in request.hosts[: request.grid.nodes]:
        words = list(node_words(request))
        if request.ranks_by == "phalanx":
            words.insert(words.index("phalanx.cli.node") + 1, "--controlled=variables" if names else "--controlled")
        settings = [f"{name}={value}" for name, value in sorted(request.exported.values.items())]
        inside = f"cd {shlex.quote(request.folder)} && exec {shlex.join(['env', *settings, *words])}"
        said = f"one line of JSON with {', '.join(names)}, then signals" if names else "signals, by name"
        found.append(HostCommand((*request.remote_shell, host, inside), (host,), said))
    return found
