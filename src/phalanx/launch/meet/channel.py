"""How rank 0 tells the others where it listens: what the launcher offers for that."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import RunError
from phalanx.launch.hosts import expand
from phalanx.launch.meet import identity, pmi, pmix
from phalanx.launch.meet.board import Board
from phalanx.launch.meet.offer import Offer
from phalanx.launch.ranks import Ranks

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
    name = identity.name_of(ranks, env)
    if name is None:
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave them nothing by which they find each other: set "
            "MASTER_ADDR to a host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    board = Board.of(name, env, ranks.one_node)
    host = "127.0.0.1" if ranks.one_node else first_host(ranks, env)
    ports, token = identity.ports_of(name), identity.token_of(name)
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
