"""Records when a rank is in a forward or backward pass, of which stage and layer, by hooks that only look.

The hooks are there for the recorded steps only. They change no value: losses are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.comm.calls import Recording, TimedCall, now
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.data import Replica
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.recompute import Repeated, run_again
from phalanx.train.profile.report import Communication, ProfiledRank, union
from phalanx.train.profile.trace_file import NamedRange, Range

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


_PART_OF_PHASE = {Phase.DATA: "data", Phase.EXCHANGE: "optimizer", Phase.OPTIMIZER: "optimizer"}
"""The part of a step to which a phase belongs. Exchange: the gradients' norm, and what starts its collectives."""
_MEMORY_OF = {"forward": "activations", "recompute": "activations", "backward": "backward"}

Rows = dict[str, list[NamedRange]]


def record_of(
    rank: int,
    coordinates: Mapping[str, int],
    steps: Sequence[tuple[int, int]],
    recording: Recording,
    passes: PassSpans,
    *,
    every_thread: bool = False,
) -> ProfiledRank:
    """Returns a rank's record of its steps, for its shares. Backward passes on a GPU have threads of their own, whose
    calls count with `every_thread`."""
    work: dict[str, list[tuple[int, int]]] = {}
    for kind, _, start, end in passes.spans:
        work.setdefault(kind, []).append((start, end))
    for phase, start, end in _phases(recording, steps):
        if part := _PART_OF_PHASE.get(phase):
            work.setdefault(part, []).append((start, end))
    calls = [_communication(call) for call in recording.calls if (call.main or every_thread) and call.launched]
    return ProfiledRank(rank, list(steps), {k: union(v) for k, v in work.items()}, calls, "cpu", dict(coordinates))


def _communication(call: TimedCall) -> Communication:
    end = max(call.done or call.launched, call.launched)
    return Communication(
        call.axis,
        call.collective,
        call.channel,
        call.sequence,
        call.start,
        end,
        call.waited,
        call.launched,
        call.bytes,
        call.sends,
        call.receives,
    )


def _phases(recording: Recording, steps: Sequence[tuple[int, int]]) -> Iterator[tuple[Phase, int, int]]:
    last = steps[-1][1] if steps else 0
    for (start, phase), (end, _) in pairwise([*recording.phases, (last, Phase.RECORD)]):
        if end > start:
            yield phase, start, end


def rows_of(record: ProfiledRank, recording: Recording, passes: PassSpans, first: int) -> tuple[Rows, list[NamedRange]]:
    """Returns the rows of a rank's trace, by name, and its collectives in flight. `first` is the first step's
    number."""
    rows: Rows = {"step": [(f"step {first + n}", start, end, {}) for n, (start, end) in enumerate(record.steps)]}
    inside = (record.steps[0][0], record.steps[-1][1]) if record.steps else (0, 0)

    def add(row: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        if start < inside[1] and end > inside[0]:
            rows.setdefault(row, []).append((name, start, end, args or {}))

    for phase, start, end in _phases(recording, record.steps):
        add("phase", "data wait" if phase is Phase.DATA else phase.label, start, end)
    for _, name, start, end in sorted(passes.spans, key=lambda span: (span[2], -span[3])):
        add("pass", name, start, end)
    for kind, name, start, end in sorted(passes.layers, key=lambda span: span[2]):
        add("layer", f"{kind} {name}", start, end)
    flights = []
    for call in sorted(record.calls, key=lambda call: call.start):
        name = f"{call.axis} {call.collective}"
        args = {"axis": call.axis, "collective": call.collective, "bytes": call.bytes, "call": call.sequence}
        add("communication", f"{name}: start", call.start, call.launched, args)
        flights.append((name, call.start, call.end, args))
    for call in sorted((call for call in record.calls if call.waited), key=lambda call: call.waited):
        add("waiting", f"{call.axis} {call.collective}: wait", call.waited, call.end, {"bytes": call.bytes})
    return rows, [flight for flight in flights if flight[1] < inside[1] and flight[2] > inside[0]]


def ranges_of(record: ProfiledRank, recording: Recording, passes: PassSpans) -> list[Range]:
    """Returns the ranges that name allocations."""
    found = [Range(_MEMORY_OF[kind], name, start, end) for kind, name, start, end in passes.spans]
    found += [Range(_MEMORY_OF[kind], f"{kind} {name}", start, end) for kind, name, start, end in passes.layers]
    for call in record.calls:
        found.append(Range("communication", f"{call.axis} {call.collective}", call.start, call.launched))
    for phase, start, end in _phases(recording, record.steps):
        part = "optimizer step" if phase is Phase.OPTIMIZER else "other"
        found.append(Range(part, phase.label, start, end))
    return found
