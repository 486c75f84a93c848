"""Injects one fault into one rank. Python imports this file by itself, because the bench alone puts its folder on
PYTHONPATH; PHALANX_CHAOS_PLUGIN says what to do: {"rank": 1, "at": "step", "step": 12, "do": "kill", ...}.

It hooks torch, not the program: optimizer steps and torch.distributed's collectives. So the same fault meets every
program.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

_PLAN = json.loads(os.environ.get("PHALANX_CHAOS_PLUGIN") or "{}")
_BIG = 1000  # elements from which a tensor is a gradient, not a status


class _Plan:
    """The fault, and how far this process is."""

    def __init__(self):
        self.steps = 0  # optimizer steps done by this process
        self.fired = False
        self.first = None

    def due(self, at):
        """Returns whether the fault belongs here and now. If so, leaves the mark that the bench waits for."""
        # The rank is asked for now: a process may become a rank only after its imports.
        if os.environ.get("RANK") != str(_PLAN.get("rank")) or at != _PLAN["at"]:
            return False
        if self.first is None:
            # A fault of every attempt comes back at the same step, which a process that has resumed reaches sooner.
            again = "again" in _PLAN and os.path.exists(_PLAN["mark"])
            self.first = _PLAN["again"] if again else _PLAN.get("step", 0)
        if self.steps < self.first:
            return False
        if _PLAN.get("every"):  # a lasting fault
            self._mark()
            return True
        if self.fired or ("again" not in _PLAN and os.path.exists(_PLAN["mark"])):
            return False
        self.fired = True
        self._mark()
        return True

    def _mark(self):
        with open(_PLAN["mark"], "a", encoding="utf-8") as file:
            file.write(f"step {self.steps}\n")


_plan = _Plan()


def _after_import(name, then):
    """Calls then(module) once the module `name` is imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def execute_and_patch(module):
                execute(module)
                then(module)

            spec.loader.exec_module = execute_and_patch
            return spec

    sys.meta_path.insert(0, Finder())


def _hook_optimizer(module):
    def before(optimizer, *_):
        if _plan.due("step"):
            import actions

            actions.run(_PLAN["do"], _PLAN, optimizer)

    def after(optimizer, *_):
        _plan.steps += 1
        if _plan.due("after-step"):
            import actions

            actions.run(_PLAN["do"], _PLAN, optimizer)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _hook_collectives(module):
    original = module.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.numel() >= _BIG and tensor.is_floating_point() and _plan.due("all_reduce"):
            import actions

            tensor = actions.collective(_PLAN["do"], _PLAN, tensor, kwargs.get("group"))
        return original(tensor, *args, **kwargs)

    module.all_reduce = all_reduce


def _hook_reading():
    """Token shards are read by os.pread; in a rank that trains, nothing else is."""
    original = os.pread

    def pread(*place):
        if _plan.due("data"):
            import actions

            actions.run(_PLAN["do"], _PLAN, None)
        return original(*place)

    os.pread = pread


def _note_process(module):
    """Leaves each rank's process id beside the mark: its environment in /proc may be older than its rank."""
    original = module.init_process_group

    def init_process_group(*args, **kwargs):
        with open(f"{_PLAN['mark']}.rank{os.environ.get('RANK')}", "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        return original(*args, **kwargs)

    module.init_process_group = init_process_group


def _hook_distributed(module):
    _hook_collectives(module)
    _note_process(module)


if _PLAN:
    sys.path.append(os.path.dirname(__file__))
    _after_import("torch.optim.optimizer", _hook_optimizer)
    _after_import("torch.distributed", _hook_distributed)
    if _PLAN["at"] == "data":
        _hook_reading()
