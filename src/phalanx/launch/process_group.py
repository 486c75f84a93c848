"""Joins the ranks into torch's process group, and leaves it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store  # torch.distributed.*, to the type stubs

from phalanx.errors import RunError, StoppedError
from phalanx.launch.environment import LOOPBACK, STORE
from phalanx.launch.ranks import Ranks


@contextmanager
def process_group(ranks: Ranks, *, device: torch.device, timeout_s: float) -> Iterator[None]:
    """The process group for the length of a `with` block.

    After an error the group of several ranks is left as it is: peers may be inside a collective, and waiting for them
    would hide the error. The process is about to end. A planned stop is no such error: all ranks stop together.

    Raises:
        RunError: as `init`.
    """
    init(ranks, device=device, timeout_s=timeout_s)
    try:
        yield
    except BaseException as error:
        if ranks.world == 1 or isinstance(error, StoppedError):
            shutdown()
        raise
    shutdown()


def init(ranks: Ranks, *, device: torch.device, timeout_s: float) -> None:
    """Initialises the default process group with the backend that `backend_of` names.

    A world of one also gets a group, so that callers need not check for one. Ranks of our own launcher meet in
    its file, others at MASTER_ADDR:MASTER_PORT. Where all ranks are on this machine, the sockets stay on loopback.

    Args:
        ranks: the place of this process.
        device: the rank's own, as `device_of` gives it.
        timeout_s: seconds that this and every later collective may wait for a peer.

    Raises:
        RunError: there is no rendezvous, or a peer did not join in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.one_node:
        os.environ.update(LOOPBACK)
    store = _local_store(ranks)
    if store is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise RunError(
            f"{ranks.source} started {ranks.world} ranks, but gave no rendezvous address: set MASTER_ADDR to a "
            "host name of rank 0's node and MASTER_PORT to a free port, the same for every rank."
        )
    try:
        # Without device_id: torch would bind NCCL's communicator to the device and split groups off it, which all ranks
        # must call together, while only their members create some of ours (Mesh.among).
        dist.init_process_group(
            backend_of(ranks, device),
            init_method="env://" if store is None else None,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise RunError(_no_group(ranks, store, timeout_s, error)) from error


def backend_of(ranks: Ranks, device: torch.device) -> str:
    """Returns the backend: gloo for CPU tensors; for GPU tensors NCCL, or gloo where ranks of a node share a GPU."""
    if device.type == "cpu":
        return "gloo"
    shared = (ranks.local_world or 1) > torch.cuda.device_count()
    # Not just "gloo": beside a default group of that name torch 2.11's DeviceMesh creates NCCL groups.
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def device_of(ranks: Ranks, device_type: str) -> torch.device:
    """Returns the device of a rank: the CPU, or the GPU with the rank's number on its node, modulo the node's GPUs."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())


def new_group(ranks: Sequence[int], backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Creates the group of some global ranks, this one included, by default with the timeout of the default group:
    torch's own default is 30 minutes. Only its members call it."""
    group = dist.new_group(list(ranks), timeout or _timeout(), backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is among them"
    return group


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Gives a group that torch created the timeout of the default group."""
    dist.distributed_c10d._set_pg_timeout(_timeout(), group)


def _timeout() -> timedelta:
    """Returns the timeout of the default group, whose CPU backend is gloo's in any case."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout


def shutdown() -> None:
    """Destroys the process group and drops all references to it: the threads of a referenced group keep running, and
    one whose peer is gone can occupy a whole core."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # DTensor caches sharding decisions, each with a mesh and its groups.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    gc.collect()  # objects that refer to each other in a circle


def _local_store(ranks: Ranks) -> Store | None:
    """Returns the store of ranks of one machine, without a port: our launcher's file, or memory for a lone rank."""
    if STORE in os.environ:
        store = FileStore(os.environ[STORE], ranks.world)
        store.set(_joined(ranks.rank), "yes")
        return store
    return HashStore() if ranks.world == 1 else None


def _joined(rank: int) -> str:
    return f"phalanx/joined/{rank}"


def _no_group(ranks: Ranks, store: Store | None, timeout_s: float, error: RuntimeError) -> str:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    failed = f"Rank {ranks.rank} of {ranks.world} could not join the others (waited at most {timeout_s:g} s): {message}"
    if store is None:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return (
            f"{failed}\nCheck that all {ranks.world} ranks were started, that every node reaches {where} "
            "(name, firewall, port not in use), and that GLOO_SOCKET_IFNAME, where set, names an interface of "
            "every node."
        )
    missing = [str(rank) for rank in range(ranks.world) if not store.check([_joined(rank)])]
    if missing:
        return f"{failed}\nNot there: rank {', '.join(missing)}. See the end of its log."
    return f"{failed}\nAll ranks joined; see the first error in their logs."
