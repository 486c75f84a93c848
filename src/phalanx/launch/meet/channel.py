"""How rank 0 tells the others where it listens: what the launcher offers for that."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from phalanx.bounded import read_text
from phalanx.data.files import write_atomic
from phalanx.errors import RunError
from phalanx.launch.hosts import expand
from phalanx.launch.meet import pmi, pmix
from phalanx.launch.meet.offer import Offer
from phalanx.launch.ranks import Ranks

# Tells all ranks what rank 0 says, through a file that they share: for launchers that offer nothing better.
_IN_MEMORY = Path("/dev/shm")
_LONGEST = 4096
_LEFT_OVER_S = 7 * 86400.0


@dataclass(frozen=True)
class Board:
    """The file of one launch."""

    path: Path

    @classmethod
    def of(cls, key: str, env: Mapping[str, str], one_node: bool) -> Board:
        """Returns the board of the launch that is called `key`: in memory if its ranks are on one node, otherwise in
        the user's directory for state ($XDG_STATE_HOME, by default ~/.local/state), which nodes usually share."""
        folder = Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/"), ".local", "state"), "phalanx", "ranks")
        if one_node and os.access(_IN_MEMORY, os.W_OK | os.X_OK):
            folder = _IN_MEMORY / f"phalanx-ranks-{os.getuid()}"
        return cls(folder / sha256(key.encode()).hexdigest()[:24])

    def write(self, offer: Offer) -> None:
        """Writes rank 0's offer. Raises RunError if the folder cannot be made, or others can write to it."""
        folder = self.path.parent
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder)
            _remove_left_over(folder)
            write_atomic(self.path, offer.encode().encode())
        except OSError as error:
            raise RunError(
                f"Rank 0 cannot tell the others where it listens: {error.filename or folder}: {error.strerror or error}"
                ". Set XDG_STATE_HOME to a folder that all nodes share, or set MASTER_ADDR and MASTER_PORT."
            ) from error

    def read(self) -> list[Offer]:
        """Returns the offer, if there is one yet."""
        with suppress(OSError, ValueError, RunError):
            os.listdir(self.path.parent)  # or NFS may remember for a while that there was no such file
            _require_private(self.path.parent)
            return [Offer.decode(read_text(self.path, _LONGEST).strip())]
        return []

    def remove(self) -> None:
        """Removes the file once all ranks have met."""
        with suppress(OSError):
            self.path.unlink()


def _require_private(folder: Path) -> None:
    """Raises RunError unless only this user can write to a folder, which may be in a place where others can."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RunError(
            f"{folder}, where the ranks leave word for each other, belongs to another user or is writable by others: "
            "remove it, or set MASTER_ADDR and MASTER_PORT"
        )


def _remove_left_over(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFT_OVER_S:
                path.unlink()


# The launcher's own name of a launch, the same for its ranks and no others. Pure functions of the environment.
_NAMES = {
    "slurm": (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME")),
    "pals": (("PALS_APID",), ("PBS_JOBID",)),
    # A namespace is a number that comes again; where mpirun listens makes it unique among those that live.
    "openmpi": (("PMIX_NAMESPACE",), ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid")),
    "mpich": (("PALS_APID",), ()),
    "mvapich2": (("MPIRUN_ID",), ("MPIRUN_HOST", "MPIRUN_PORT")),
    "jsrun": (("PMIX_NAMESPACE",), ("LSB_JOBID",)),
    "flux": (("FLUX_JOB_ID",), ("FLUX_URI",)),
}
"""Variables that name a launch, by launcher: those without which it has no name, and those that are added."""

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below 32768, where Linux begins to choose ports for connections."""
_TRIES = 8


def name_of(ranks: Ranks, env: Mapping[str, str]) -> str | None:
    """Returns the name of the launch, or None if its launcher gives none."""
    needed, added = _NAMES.get(ranks.source, (("",), ()))
    if not all(env.get(name) for name in needed):
        return None
    return " ".join([ranks.source, *(f"{name}={env.get(name, '')}" for name in (*needed, *added))])


def token_of(name: str) -> str:
    """Returns the token of a launch, for ranks that can only compute it. It is no secret."""
    return sha256(f"phalanx token {name}".encode()).hexdigest()[:32]


def ports_of(name: str) -> tuple[int, ...]:
    """Returns the ports that rank 0 of a launch tries to listen on, in order."""
    digest = sha256(f"phalanx ports {name}".encode()).digest()
    return tuple(
        _FIRST_PORT + int.from_bytes(digest[2 * index : 2 * index + 2], "big") % _PORTS for index in range(_TRIES)
    )


_MOST_BYTES = 1 << 22  # of a node file


@dataclass(frozen=True)
class OfferChannel:
    """The way by which an offer of rank 0 reaches the others."""

    how: str
    """For messages: by what the ranks find each other."""
    ports: tuple[int, ...]
    """Ports that rank 0 tries, in order; 0 stands for any."""
    token: str
    """What rank 0's store must know; the offer may hold another one, which then counts."""
    announce: Callable[[Offer, float], None]
    """Publishes rank 0's offer, within so many seconds. Raises OSError or RunError."""
    offers: Callable[[float], list[Offer]]
    """Returns where rank 0 may be, as far as this rank knows now; waits for at most so many seconds. Raises OSError."""
    forget: Callable[[], None] = lambda: None
    """Removes what `announce` has left behind."""


def channel_of(ranks: Ranks, env: Mapping[str, str]) -> OfferChannel:
    """Returns the channel of the ranks that a launcher has started.

    In this order: the process manager (PMIx, PMI-1), which only this launch's ranks can ask; a file that the ranks
    share, and for Slurm and PALS also the first host of the launch with ports that every rank computes.

    Raises RunError if there is none.
    """
    if pmix.is_there(env):
        return _managed("the process manager (PMIx)", pmix.exchange)
    if pmi.is_there(env):
        return _managed("the process manager (PMI)", lambda text, seconds: pmi.exchange(env, text, seconds))
    name = name_of(ranks, env)
    if name is None:
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave them nothing by which they find each other: set "
            "MASTER_ADDR to a host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    board = Board.of(name, env, ranks.one_node)
    host = "127.0.0.1" if ranks.one_node else first_host(ranks, env)
    ports, token = ports_of(name), token_of(name)
    computed = [Offer((host,), port, token) for port in ports] if host else []

    def announce(offer: Offer, _: float) -> None:
        try:
            board.write(offer)
        except RunError:
            if not computed:
                raise

    return OfferChannel(
        how=f"{f'host {host} or ' if host else ''}the file {board.path}",
        ports=ports if computed else (0,),
        token=token if computed else secrets.token_hex(16),
        announce=announce,
        offers=lambda _: board.read() + computed,
        forget=board.remove,
    )


def first_host(ranks: Ranks, env: Mapping[str, str]) -> str | None:
    """Returns the host of rank 0, from the node list of the Slurm step, or the node file of PBS; None if neither says
    it. Slurm's variable SLURM_LAUNCH_NODE_IPADDR is where srun runs, which may be a login node."""
    with suppress(ValueError, OSError):
        if ranks.source == "slurm":
            return next(iter(expand(env.get("SLURM_STEP_NODELIST", ""))), None)
        if ranks.source == "pals" and "PBS_NODEFILE" in env:
            with Path(env["PBS_NODEFILE"]).open(encoding="utf-8") as file:
                return next(iter(file.read(_MOST_BYTES).split()), None)
    return None


def _managed(how: str, exchange: Callable[[str | None, float], str]) -> OfferChannel:
    """Returns the channel through a process manager, which all ranks ask once."""
    known: list[Offer] = []

    def announce(offer: Offer, seconds: float) -> None:
        exchange(offer.encode(), seconds)

    def offers(seconds: float) -> list[Offer]:
        if not known:
            try:
                known.append(Offer.decode(exchange(None, seconds)))
            except ValueError as error:
                raise OSError(f"what rank 0 has put there is no address: {error}") from error
        return known

    return OfferChannel(how, (0,), secrets.token_hex(16), announce, offers)
