"""The launcher's own name of a launch, the same for its ranks and no others. Pure functions of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from phalanx.launch.ranks import Ranks

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
