"""Records when a rank is in a forward or backward pass, of which stage and layer, by hooks that only look.

The hooks are there for the recorded steps only. They change no value: losses are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.comm.calls import now
from phalanx.parallel.data import Replica
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.recompute import Repeated, run_again

PassKind = Literal["forward", "backward", "recompute"]


@dataclass
class PassSpans:
    """The passes of one rank: kind, name, start and end, in nanoseconds of the recording's clock."""

    spans: list[tuple[PassKind, str, int, int]] = field(default_factory=list)
    """Whole passes, and what is recomputed inside of backward passes."""
    layers: list[tuple[PassKind, str, int, int]] = field(default_factory=list)
    """The blocks inside of them."""

    def add(self, kind: PassKind, name: str, start: int) -> None:
        self.spans.append((kind, name, start, now()))


@contextmanager
def observed(replica: Replica, passes: PassSpans, *, layers: bool) -> Iterator[None]:
    """Records the passes of a `with` block; `layers`: also those of each block, which must not be compiled."""
    with ExitStack() as held:
        for hook in _Objective(passes).hooks(replica):
            held.callback(hook.remove)
        blocks = replica.objective.model.blocks
        if layers:
            for layer, block in blocks.items():
                for hook in _Layer(passes, f"layer {layer}").hooks(block):
                    held.callback(hook.remove)
            repeat = partialmethod(_repeat, passes, Repeated.repeat)
            held.enter_context(_replaced(Repeated, "repeat", repeat))
            for module in blocks.modules():
                if getattr(module, "run", None) is run_again:
                    held.enter_context(_replaced(module, "run", partial(_run_again, passes)))
        if isinstance(replica.runner, Pipeline):
            add = replica.runner.deferred.add
            held.enter_context(_replaced(replica.runner.deferred, "add", partial(_weight_gradients, passes, add)))
        yield


class _Objective:
    """Hooks on the module that computes a stage, or the whole model with its loss."""

    def __init__(self, passes: PassSpans):
        self.passes, self.start, self.name = passes, 0, ""

    def hooks(self, replica: Replica) -> Iterator[Any]:
        stages = replica.model.stages
        self.numbers = {} if stages is None else {id(stage): number for number, stage in stages.local_stages.items()}
        yield replica.objective.register_forward_pre_hook(self.begin)
        yield replica.objective.register_forward_hook(self.end)

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        number = self.numbers.get(id(inputs[1])) if len(inputs) > 1 else None
        self.name, self.start = "" if number is None else f" stage {number}", now()

    def end(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return  # a validation
        self.passes.add("forward", f"forward{self.name}", self.start)
        output.register_hook(partial(self.backward, f"backward{self.name}"))

    def backward(self, name: str, _: Tensor) -> None:
        # The engine calls back when the whole backward pass is done.
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
        engine.queue_callback(partial(self.passes.add, "backward", name, now()))


class _Layer:
    """Hooks on a block. Its backward pass is the time between the gradients of its output and of its input."""

    def __init__(self, passes: PassSpans, name: str):
        self.passes, self.name, self.start, self.back = passes, name, 0, 0

    def hooks(self, block: nn.Module) -> Iterator[Any]:
        yield block.register_forward_pre_hook(self.begin)
        yield block.register_forward_hook(self.end)

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.start = now()
        if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(self.input_gradient)

    def end(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            self.passes.layers.append(("forward", self.name, self.start, now()))
            output.register_hook(self.output_gradient)

    def output_gradient(self, _: Tensor) -> None:
        self.back = now()

    def input_gradient(self, _: Tensor) -> None:
        if self.back:
            self.passes.layers.append(("backward", self.name, self.back, now()))
            self.back = 0


def _repeat(repeated: Repeated, passes: PassSpans, repeat: Callable[[Repeated], None]) -> None:
    """Repeats what is cheap, and records it."""
    start = now()
    repeat(repeated)
    passes.add("recompute", "recompute", start)


def _run_again(passes: PassSpans, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Does what `run_again` does, and records the second computation, which autograd may end early."""
    calls = 0

    def timed(*inputs: Any) -> Tensor:
        nonlocal calls
        calls, start = calls + 1, now()
        try:
            return compute(*inputs)
        finally:
            if calls > 1:
                passes.add("recompute", "recompute", start)

    return run_again(timed, *inputs)


def _weight_gradients(passes: PassSpans, add: Callable[[Any], None], products: Any) -> None:
    """Records the second half of a split backward pass."""
    start = now()
    add(products)
    passes.add("backward", "weight gradients", start)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute for the length of a `with` block."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)
