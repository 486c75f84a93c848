"""Runs on the ranks: records the steps of a job on one process, and compares every layout with that record.

Tensors are reassembled one at a time, on rank 0, and the record is read one tensor at a time, so that a layout's case
needs no more memory than its training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.comm.axis import Pending
from phalanx.config.corpora import CORPORA, PAIR, has_answers, has_pairs, has_prompts
from phalanx.config.job import IGNORE, Job
from phalanx.config.layout import Layout
from phalanx.data.loader import MicroBatch
from phalanx.launch.process_group import device_of
from phalanx.launch.ranks import Ranks
from phalanx.model.layers import Linear, Multiply
from phalanx.model.seeding import derive_seed
from phalanx.model.transformer import Head
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.parameter_shards import wholes
from phalanx.parallel.pipeline import PipeDream
from phalanx.parallel.precision import DTYPES, LossScale
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import stage_shapes, stashes
from phalanx.partition.ramp import ramp_of
from phalanx.train.agreement import agree_on_job
from phalanx.train.drivers import UnflushedSteps
from phalanx.train.evaluate import validation_loss
from phalanx.train.guard import GRADIENT, PARAMETER, Replicas, repeats_exactly
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.step import Step, StepInputs, Stepper

MIN_STEPS = 4
"""The minimum number of steps: the first two use the same weights, the third one's are stale, the last one drains the
pipeline."""

Read = Callable[[int], tuple[list[MicroBatch], int]]
"""Returns a step's micro-batches on this rank, and the valid tokens of the whole batch."""


def rate(job: Job, step: int) -> float:
    """Returns the learning rate of a step, from 0: another one in each, so that none is taken for another's."""
    return job.optimizer.lr / (step + 1)


def streamed(stepper: Stepper, pipeline: PipeDream, read: Read, steps: int) -> list[Step]:
    """Takes steps through the pipeline, which is empty before and after each size of a ramp, and returns them."""
    stream, taken, ramp = UnflushedSteps(stepper, pipeline), list[Step](), ramp_of(stepper.job)
    for step in range(steps):
        batches, valid = read(step)
        drains = step == steps - 1 or ramp.begins(step + 1)
        more = None if drains else (lambda following=step + 1: read(following)[0])
        inputs = StepInputs(batches, step, valid, rate(stepper.job, step))
        taken += [known for _, known in stream.step(inputs, more)]
    return taken


def delayed(stepper: Stepper, read: Read, steps: int) -> list[Step]:
    """Takes steps with equally stale gradients on one process, and returns them."""
    weights = [shard.value for shard in stepper.replica.shards]
    older = newest = _copies(weights)
    taken, ramp = [], ramp_of(stepper.job)
    for step in range(steps):
        batches, valid = read(step)
        _put(weights, newest if ramp.begins(step) else older)
        loss = stepper.gradients(batches, step, valid)
        _put(weights, newest)
        square, status, everywhere = stepper.status(loss)
        everywhere.wait()
        stepper.optimizer.step(rate(stepper.job, step), square.sqrt())
        stepper.replica.clear()
        older, newest = newest, _copies(weights)
        taken.append(Step((status[0] / valid).item(), square.sqrt().item()))
    return taken


def stashed(
    stepper: Stepper, read: Read, steps: int, layout: Layout, note: Callable[[], None] = lambda: None
) -> list[Step]:
    """Takes steps with an update per micro-batch on one process, each gradient of a stage at the weights that it has
    when the micro-batch goes forward there in 1F1B, and returns them. `note` is called with every gradient."""
    job, vocab = stepper.job, stepper.vocab_size
    cut = [stage_shapes(job.model, [layers], vocab) for layers in stages_of(job.model, layout, layout.pp, vocab)]
    stage = {name: number for number, names in enumerate(cut) for name in names}
    weights = [shard.value for shard in stepper.replica.shards]
    behind = [layout.pp - 1 - stage[shard.whole_name] for shard in stepper.replica.shards]
    taken = []
    for step in range(steps):
        batches, valid = read(step)
        versions, losses, squares = [_copies(weights)], 0.0, []
        for number, micro in enumerate(batches):
            _put(weights, [versions[max(0, number - late)][n] for n, late in enumerate(behind)])
            loss = stepper.gradients([micro], step, float((micro.targets != IGNORE).sum()))
            _put(weights, versions[-1])
            note()
            square = stepper.optimizer.square_norm(stepper.loss_scale.value)
            stepper.optimizer.step(rate(job, step), square.sqrt())
            stepper.replica.clear()
            versions.append(_copies(weights))
            losses, squares = losses + float(loss), [*squares, float(square)]
        stepper.status(torch.zeros((), dtype=torch.float64, device=stepper.device))[2].wait()
        taken.append(Step(losses / valid, math.sqrt(sum(squares) / len(squares))))
    return taken


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def _put(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


TOLERANCE = 1e-9
"""Largest relative difference, in float64, that counts as equal."""
SCALED_BLOCK = 32
"""Numbers that share a scale in 8 bits, at most: chunks of a product consist of whole blocks."""
ROUNDING = 1e-7
"""A gradient's scale is at least this fraction of the largest gradient of all. Times TOLERANCE that is 1e-16 of it, the
rounding of float64: some gradients (of a key's bias) are zero except for rounding, which differs with the layout."""
DOCUMENT_ENDS = 0.15
"""The fraction of tokens that are the last of their document."""
PACKED = 3
"""The most conversations of a row."""
SAME = 2
"""The first of so many parts of the rows has one token alone, so that some experts get none of a micro-batch: a token
at which tensor ranks cut the vocabulary."""
ANSWER_BORDERS = 0.2
"""The fraction of tokens at which an answer begins or ends."""

LOSS_SCALE = 2.0**8
"""The loss scale of fp16 here: small models have large gradients, which the first scales of a run would overflow."""

Observe = Callable[[str, Tensor], None]
"""Called on rank 0 with a key (`gradient/STEP/NAME` or `parameter/NAME`) and a whole tensor."""


@dataclass
class Differences:
    """The relative differences between a layout's steps and those of one process."""

    losses: list[float] = field(default_factory=list)
    """Relative difference of the loss of each step."""
    gradients: list[dict[str, float]] = field(default_factory=list)
    """Relative differences by step, then by parameter, in the model's order."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Relative differences after the last step, by parameter."""
    norms: list[float] = field(default_factory=list)
    """Relative difference of the gradients' norm of each step; empty where replicas have norms of their own."""
    validation: float = 0.0
    """Relative difference of the validation loss after the last step."""
    copies: list[list[str]] = field(default_factory=list)
    """By step, the parameters whose gradients differ between ranks that hold the same of them, and last those that
    differ themselves after the last step: bit by bit, so that a gradient that is still a part of a sum is among them
    whatever one process computes."""
    all_parameters: float = 0.0
    """The root of the sum of squares of the differences of all parameters, relative to that of the parameters."""
    values: list[float] = field(default_factory=list)
    """The losses themselves."""
    expected: list[float] = field(default_factory=list)
    """The losses of one process."""


def nothing(_: Ranks) -> None:
    """Does nothing; starts the ranks of a pool."""


def record(ranks: Ranks, job: Job, vocab_size: int, steps: int, path: Path, stale: Layout | None = None) -> None:
    """Writes losses, gradients and parameters of `steps` steps of a job of one process, as safetensors. `stale`: as
    `run_steps`."""
    tensors: dict[str, Tensor] = {}

    def observe(key: str, whole: Tensor) -> None:
        tensors[key] = whole.clone()  # the optimizer clips the gradient and updates the parameter in place

    found = run_steps(ranks, job, vocab_size, steps, partial(_observed, observe, ranks.rank == 0, 1), stale)
    largest = [
        max(float(tensor.abs().max()) for key, tensor in tensors.items() if _is_of_the_loss(key, step))
        for step in range(steps)
    ]
    save_file(tensors, path, {"scalars": json.dumps(asdict(found)), "largest": json.dumps(largest)})


def compare(
    ranks: Ranks,
    job: Job,
    vocab_size: int,
    steps: int,
    path: Path,
    *,
    own_precision: bool = False,
    chunks: int = 1,
    stale: Layout | None = None,
) -> Differences | None:
    """Runs the same steps on the ranks of a layout and compares them with the record. Rank 0 returns the result.
    With `own_precision` they run in the job's own precision, and not in float64; with `chunks`, on one process, linear
    layers add their products in so many parts.

    The difference of a tensor is max|a - b| / scale. The scale of a gradient is the largest element of the tensor, but
    at least ROUNDING × the largest of all gradients of the step. That of a parameter is its largest element, but at
    least the learning rate, the size of one step of Adam, which turns rounding noise in a gradient that should be zero
    into up to lr × noise / eps.
    """
    found = Differences(gradients=[{} for _ in range(steps)])
    dtype = DTYPES[job.train.precision] if own_precision else torch.float64
    rounding = max(ROUNDING, torch.finfo(dtype).eps) if own_precision else ROUNDING
    squares = torch.zeros(2, dtype=torch.float64)
    with safe_open(path, "pt") as expected:
        facts = expected.metadata()
        largest: list[float] = json.loads(facts["largest"])

        def observe(key: str, whole: Tensor) -> None:
            kind, rest = key.split("/", 1)
            if kind == "parameter":
                right = expected.get_tensor(key)
                found.parameters[rest] = difference(whole, right, job.optimizer.lr)
                squares.add_(torch.stack([(whole - right).double().square().sum(), right.double().square().sum()]))
                return
            step, name = rest.split("/", 1)
            found.gradients[int(step)][name] = difference(
                whole, expected.get_tensor(key), rounding * largest[int(step)]
            )

        prepare = partial(_observed, observe, ranks.rank == 0, chunks)
        here = run_steps(ranks, job, vocab_size, steps, prepare, stale, dtype)
        there = Scalars(**json.loads(facts["scalars"]))
        found.values, found.expected, found.copies = here.losses, there.losses, here.copies
        found.losses = [relative(*pair) for pair in zip(here.losses, there.losses, strict=True)]
        found.norms = [relative(*pair) for pair in zip(here.norms, there.norms, strict=False)]
        if here.validation is not None and there.validation is not None:
            found.validation = relative(here.validation, there.validation)
    if ranks.rank:
        return None
    found.all_parameters = float((squares[0] / squares[1]).sqrt())
    names = parameter_shapes(job.model, vocab_size)
    trained = trained_shapes(job.model, vocab_size)
    found.gradients = [_in_order(step, trained) for step in found.gradients]
    found.parameters = _in_order(found.parameters, names)
    return found


def multiply_in_chunks(model: nn.Module, chunks: int, block: int) -> None:
    """Makes the linear layers of one process add their products in up to `chunks` parts, each rounded: over inputs in
    the forward pass, over outputs and tokens in the backward pass, as ranks that have parts of them do. Parts consist
    of whole blocks of `block` numbers."""
    for module in model.modules():
        if isinstance(module, Linear | Head):
            module.multiply = partial(_in_chunks, module.multiply, chunks, block)


def _in_chunks(
    multiply: Multiply, chunks: int, block: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
    tokens, (outputs, inputs) = x.flatten(0, -2), weight.shape

    def parts(size: int) -> int:
        return next(n for n in range(chunks, 0, -1) if n == 1 or size % (n * block) == 0)

    of_inputs = parts(inputs)
    rows = []
    for some in tokens.chunk(chunks):
        columns = []
        for wanted in weight.chunk(parts(outputs)):
            pairs = zip(some.chunk(of_inputs, -1), wanted.chunk(of_inputs, -1), strict=True)
            first, *others = (multiply(each.contiguous(), part.contiguous()) for each, part in pairs)
            columns.append(sum(others, start=first))
        rows.append(torch.cat(columns, -1))
    y = torch.cat(rows).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def _is_of_the_loss(key: str, step: int) -> bool:
    """Returns whether this key is a gradient of the loss at `step`. That of a balancing bias is a count of tokens, and
    has no rounding."""
    return key.startswith(f"gradient/{step}/") and not key.endswith(".router.bias")


def relative(found: float, expected: float) -> float:
    """Returns |a - b|, relative to `expected` unless that is zero."""
    return abs(found - expected) / (abs(expected) or 1)


def difference(found: Tensor, expected: Tensor, least_scale: float) -> float:
    """Returns max|a - b|, relative to the largest element of `expected`, but at least to `least_scale`. Raises
    ValueError for tensors of different shapes."""
    if found.shape != expected.shape:
        raise ValueError(f"a tensor of shape {tuple(found.shape)}, but of {tuple(expected.shape)} in one process")
    absolute = float((found - expected).abs().max())
    return absolute / scale if (scale := max(float(expected.abs().max()), least_scale)) else absolute


def micro_batches(
    job: Job, vocab_size: int, mesh: Mesh, step: int, cut_as: Layout | None = None
) -> tuple[list[MicroBatch], int]:
    """Returns this rank's random micro-batches of a step, and the valid tokens of the whole batch. `cut_as`: with the
    micro-batches of another layout."""
    phase = ramp_of(replace(job, layout=cut_as or job.layout)).at(step)
    rows, layout = phase.batch.global_batch, replace(job.layout, micro_batch=phase.batch.micro_batch)
    share, train = rows // mesh.data_ranks, replace(job.train, global_batch=rows)
    mine = range(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    batches, counted = drawn(replace(job, train=train, layout=layout), vocab_size, rows, mine, step)
    return [micro.cut(phase.parts) for micro in batches], counted


def drawn(job: Job, vocab_size: int, rows: int, mine: range, step: int) -> tuple[list[MicroBatch], int]:
    """Returns the random micro-batches of some of a step's `rows` sequences, and the valid tokens of all rows; their
    number differs from row to row, and the last row has none. The first rows have one token alone. With
    `data.document_mask` every row is cut into documents at different places, in odd steps also after each quarter, in
    even ones not in the middle half, and where only answers count, parts of every row do. Rows of conversations have
    padding behind the last target, and with `data.packing` several conversations. Of preference pairs the answers are
    random, too, and it returns the number of pairs; of completions everything that the loss compares, and it returns
    the number of rows."""
    seq_len, size = job.model.seq_len, batch.solve(job.train.global_batch, job.layout).micro_batch
    generator = np.random.default_rng(derive_seed(job.train.seed, "verify", step))
    tokens = generator.integers(vocab_size, size=(rows, seq_len + 1))
    tokens[: rows // SAME] = -(-vocab_size // 2)
    targets = tokens[:, 1:].copy()
    behind = np.arange(seq_len) >= generator.integers(1, seq_len + 1, size=(rows, 1))
    behind[-1] |= rows > 1 and not has_pairs(job.data)
    targets[behind] = IGNORE
    ends = generator.random((rows, seq_len)) < DOCUMENT_ENDS
    if job.data.document_mask and step % 2:  # so short that cp ranks have whole ones
        ends[:, np.arange(1, 5) * seq_len // 4 - 1] = True
    elif job.data.document_mask:  # one is longer than half, so that they exchange keys
        ends[:, seq_len // 4 : seq_len - seq_len // 4] = False
    documents = (ends.cumsum(axis=1) - ends).astype(np.int64) if job.data.document_mask else None
    if has_answers(job.data) and not has_pairs(job.data):
        targets[(generator.random((rows, seq_len)) < ANSWER_BORDERS).cumsum(axis=1) % 2 == 0] = IGNORE
    conversations, most = None, PACKED if job.data.packing else 1
    if CORPORA[job.data.corpus].rows is not None or job.data.packing:
        conversations = np.minimum(ends.cumsum(axis=1) - ends, most - 1)
        conversations[behind] = -1
    if job.model.reward:  # at the last token before the padding
        last = np.argmin(targets != IGNORE, axis=1) - 1
        targets = np.where(np.arange(seq_len) == last[:, None] % seq_len, 0, IGNORE)
    valid = targets != IGNORE
    # About what a model with small random weights gives, so that no pair is decided.
    reference = generator.normal(-valid.sum(axis=1) * math.log(vocab_size)) if has_pairs(job.data) else None
    if reference is not None and job.model.reward:
        reference[:] = 0
    counted = int(valid.sum()) if reference is None else rows // PAIR
    policy = None
    if has_prompts(job.data):  # ratios on both sides of where they are clipped
        known = -math.log(vocab_size) + generator.normal(size=(rows, seq_len, 2)) / 4
        each = np.stack((generator.normal(size=rows), 1 / np.maximum(valid.sum(axis=1), 1)), axis=1)
        policy = np.concatenate((known, np.broadcast_to(each[:, None], (rows, seq_len, 2))), axis=2)
        counted = rows
    batches = []
    for a in range(mine.start, mine.stop, size):
        part = slice(a, a + size)
        mask = None if documents is None else documents[part].copy()
        ids = step * rows + np.arange(a, a + size)
        known = None if reference is None else reference[part].copy()
        of_policy = None if policy is None else policy[part].copy()
        micro = MicroBatch(tokens[part, :-1].copy(), targets[part].copy(), ids, mask, known, of_policy)
        if conversations is not None:
            per_token = counted / int((conversations >= 0).sum())
            own = conversations[part].copy()
            micro = replace(micro, conversations=own, most_conversations=most, valid_share=per_token)
        batches.append(micro)
    return batches, counted


def _in_order(found: dict[str, float], names: Iterable[str]) -> dict[str, float]:
    """Sorts by name into the model's order: the ranks of a pipeline report their own layers, one rank after the other.
    Raises ValueError for names that none of them has reported."""
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"no rank has {', '.join(missing)}")
    return {name: found[name] for name in names}


@dataclass(frozen=True)
class Scalars:
    """The numbers of a run beside its tensors."""

    losses: list[float]
    """By step."""
    norms: list[float]
    """The gradients' norm before clipping, by step; empty for replicas that have norms of their own."""
    validation: float | None
    """The loss of another batch after the last step, without dropout; None for such replicas."""
    copies: list[list[str]]
    """Parameters whose copies differ, as in `Differences`."""


def _observed(observe: Observe, keep: bool, chunks: int, stepper: ObservedStepper) -> None:
    """Makes a stepper call `observe` for every gradient of every step, then for every parameter."""
    stepper.observe, stepper.keep = observe, keep
    if chunks > 1:
        block = SCALED_BLOCK if stepper.job.train.precision == "fp8" else 1
        multiply_in_chunks(stepper.replica.objective.model, chunks, block)


def run_steps(
    ranks: Ranks,
    job: Job,
    vocab_size: int,
    steps: int,
    prepare: Callable[[ObservedStepper], None],
    stale: Layout | None = None,
    dtype: torch.dtype = torch.float64,
) -> Scalars:
    """Trains with a stepper that `prepare` gets first, and returns what is no tensor. `stale`: on one process,
    gradients are as late as those of this layout: of a pipeline without a flush, or with stashed weights."""
    device = device_of(ranks, job.cluster.device)
    agree_on_job(job, device)
    mesh = meshes.build(job.layout, device.type)
    stepper = ObservedStepper(job, mesh, device, vocab_size, dtype)
    prepare(stepper)
    read, runner = partial(micro_batches, job, vocab_size, mesh), stepper.replica.runner
    if isinstance(runner, PipeDream):
        taken = streamed(stepper, runner, read, steps)
    elif stale and stashes(stale):
        taken = stashed(stepper, partial(read, cut_as=stale), steps, stale, stepper.add)
    elif stale:
        taken = delayed(stepper, read, steps)
    else:
        batches = (read(step) for step in range(steps))
        taken = [
            stepper.step(StepInputs(micros, step, valid, rate(job, step)))
            for step, (micros, valid) in enumerate(batches)
        ]
    stepper.show("parameter", {f.name: f.value for f in stepper.replica.shards})
    losses = stepper.mean(torch.tensor([step.loss for step in taken], dtype=torch.float64, device=device)).tolist()
    stepper.compare_copies(gradients=False)
    if stepper.independent_replicas > 1:
        return Scalars(losses, [], None, [])
    micros = (stepper.tensors(micro, steps, True) for micro in read(steps)[0])
    validation = validation_loss(stepper.replica, mesh, micros, device)
    return Scalars(losses, [step.grad_norm for step in taken], validation, stepper.copies)


class ObservedStepper(Stepper):
    """A Stepper that reports its gradients before the optimizer uses them."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device, vocab_size: int, dtype: torch.dtype):
        super().__init__(job, mesh, device, vocab_size, dtype)
        self.loss_scale = LossScale(dtype, LOSS_SCALE)
        self.observe: Observe = lambda key, whole: None
        self.keep, self.seen = False, 0
        self.sums: dict[str, Tensor] = {}
        """The gradients, summed over micro-batches, of a step that updates after each micro-batch."""
        self.held, self.copies = Replicas(self, exact=repeats_exactly(device)), list[list[str]]()

    def status(self, loss: Tensor, requests: Requests = NO_REQUESTS) -> tuple[Tensor, Tensor, Pending]:
        found = self.sums or {f.name: f.gradient for f in self.optimizer.shards if f.gradient is not None}
        self.sums = {}
        if (scale := self.loss_scale.value) != 1:
            found = {name: gradient.float() / scale for name, gradient in found.items()}
        self.show(f"gradient/{self.seen}", found)
        self.seen += 1
        status = super().status(loss, requests)
        self.compare_copies(gradients=True)
        return status

    def add(self) -> None:
        """Adds the gradient of an update within a step."""
        for shard in self.trained:
            if shard.gradient is not None:
                before = self.sums.get(shard.name)
                self.sums[shard.name] = shard.gradient.clone() if before is None else before + shard.gradient

    def _update(self) -> list[Tensor]:
        self.add()
        return super()._update()

    def compare_copies(self, *, gradients: bool) -> None:
        """Notes the parameters that differ between ranks that hold the same, in their gradients or themselves."""
        kind = GRADIENT if gradients else PARAMETER
        if self.independent_replicas == 1:
            differing = self.held.differing(gradients=gradients)
            self.copies.append([each.name.partition(" (")[0] for each in differing if each.kind == kind])

    def mean(self, tensor: Tensor) -> Tensor:
        """Returns the mean over replicas along an axis of a package, which each compute their part of the batch."""
        if self.independent_replicas == 1:
            return tensor
        total = tensor.detach().clone()
        self.mesh.axis(self.job.layout.replica_axis).all_reduce(total).wait()
        return total / self.independent_replicas

    def show(self, kind: str, tensors: dict[str, Tensor]) -> None:
        """Reassembles tensors of the shards' shapes from all ranks, and reports them."""
        shards = [shard for shard in self.replica.shards if shard.name in tensors]
        # Gradients may be on the host.
        tensors = {name: self.mean(tensor.to(self.device)) for name, tensor in tensors.items()}
        for name, whole in wholes(shards, tensors, self.mesh, self.keep):
            self.observe(f"{kind}/{name}", whole)
