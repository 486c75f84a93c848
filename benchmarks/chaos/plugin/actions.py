"""The actions of faults inside the rank that they hit. `collective` returns the tensor that goes on."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def run(do, plan, optimizer):
    """Acts at an optimizer step."""
    if do in STATE:
        STATE[do](plan, optimizer)
    else:
        PROCESS[do](plan)


def collective(do, plan, tensor, group):
    """Acts at a collective with `tensor`; returns the tensor to pass on."""
    if do in TENSOR:
        return TENSOR[do](plan, tensor, group)
    PROCESS[do](plan)
    return tensor


def _raise(plan):
    raise RuntimeError("injected: this is the user's own bug")


def _slow(plan, last=[0.0]):  # noqa: B006 - the state of the one injection
    """Makes every step `factor` times as long."""
    now = time.perf_counter()
    if last[0]:
        end = now + (now - last[0]) * (plan["factor"] - 1)
        while time.perf_counter() < end:
            pass
    last[0] = time.perf_counter()


def _deadlock(plan):
    """Waits in C for a lock that this thread holds, with the GIL held (PyDLL): no Python thread of the process runs."""
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros: a pthread mutex that is free
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def _spin(plan):
    while True:
        pass


def _allocate(plan):
    torch.empty(2**48, dtype=torch.uint8)


def _eat(plan):
    """Takes memory until something gives."""
    held = []
    while True:
        held.append(torch.ones(4 * 2**20, dtype=torch.uint8))


def _barrier(plan):
    dist.barrier()


PROCESS = {
    "kill": lambda plan: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda plan: ctypes.string_at(0),
    "exit": lambda plan: os._exit(0),
    "raise": _raise,
    "gil": _deadlock,
    "spin": _spin,
    "slow": _slow,
    "sleep": lambda plan: time.sleep(plan["seconds"]),
    "allocate": _allocate,
    "eat": _eat,
    "barrier": _barrier,
}


def _flip(tensor, bit):
    """Flips a bit of the element of median size, so that the value is an ordinary one."""
    flat = tensor.detach().view(-1)
    place = int(flat.abs().argsort()[len(flat) // 2])
    bits = flat[place : place + 1].view(INTEGERS[tensor.dtype])
    bits ^= torch.tensor([1 << bit], dtype=bits.dtype)


def _weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.numel() >= 1000]


def _moment(optimizer):
    return optimizer.state[_weights(optimizer)[0]]["exp_avg"]


@torch.no_grad()
def _nan_weight(plan, optimizer):
    _weights(optimizer)[0].view(-1)[7] = float("nan")


@torch.no_grad()
def _nan_moment(plan, optimizer):
    _moment(optimizer).view(-1)[7] = float("nan")


STATE = {
    "flip-weight": lambda plan, optimizer: _flip(_weights(optimizer)[0], plan["bit"]),
    "flip-moment": lambda plan, optimizer: _flip(_moment(optimizer), plan["bit"]),
    "nan-weight": _nan_weight,
    "nan-moment": _nan_moment,
}


def _changed(plan, tensor, group):
    tensor.view(-1)[7] = float(plan["value"])
    return tensor


def _scaled(plan, tensor, group):
    return tensor.mul_(plan["factor"])


def _flipped(plan, tensor, group):
    _flip(tensor, plan["bit"])
    return tensor


def _other_operation(plan, tensor, group):
    """Calls an all-gather where the others call an all-reduce."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return tensor


def _twice(plan, tensor, group):
    """Calls the collective once more than the others do."""
    dist.all_reduce(tensor.clone(), group=group)
    return tensor


TENSOR = {
    "set": _changed,
    "scale": _scaled,
    "flip": _flipped,
    "other-operation": _other_operation,
    "other-shape": lambda plan, tensor, group: tensor.view(-1)[: tensor.numel() // 2].clone(),
    "other-type": lambda plan, tensor, group: tensor.double(),
    "twice": _twice,
}
