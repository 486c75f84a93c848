"""The catalogue of optimizers: their facts by name. docs/techniques/optimizers.md compares them."""

from __future__ import annotations

from phalanx.config.job import Optimizer
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean
from phalanx.optimizers.blocks import block_of
from phalanx.optimizers.entry import OptimizerEntry, Shape, StateKind, problems
from phalanx.optimizers.matrices import is_hidden_matrix, newton_schulz_flops
from phalanx.registry import Registry

ADAM_MOMENTS = (StateKind("exp_avg"), StateKind("exp_avg_sq"))


def _adamw_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return ADAM_MOMENTS


def _adamw_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 28: it reads the weight, two moments and the gradient, and writes the first three, all in one pass. In
    bf16 the gradient has two bytes less, and the weight's copy in bf16 is written."""
    return 28


def _sgd_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("momentum_buffer"),) if config.momentum else ()


def _sgd_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of reading weight, momentum and gradient, and writing the first two."""
    return 20 if config.momentum else 12


def _lion_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("exp_avg"),)


def _lion_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of reading weight, momentum and gradient, and writing the first two."""
    return 20


def _lion_moved_on_cpu(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of its kernels over chunks in the cache, in fp32: the direction (12), its threshold and its
    sign (8 each), the weights' decay (8) and step (12), and the momentum (12)."""
    return 60


def _adamw8bit_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    if not (block := block_of(shape)):
        return ADAM_MOMENTS
    codes = tuple(StateKind(moment.kind, bytes=1) for moment in ADAM_MOMENTS)
    return *codes, *(StateKind(f"{moment.kind}_scale", block=block) for moment in ADAM_MOMENTS)


ELEMENTWISE_BYTES = 32
"""Bytes that count for an element that a kernel handles alone, as in a look-up in a table: a processor then loads one
element instead of a vector of 32 bytes, and a GPU's memory a sector of 32 bytes."""
SHORT_ROW = 32
"""Rows with fewer elements are reduced element by element: torch reduces four vectors of eight at a time."""


def _adamw8bit_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns the bytes of its kernels: the step on moments in fp32 (80), and for each of the two that has codes,
    reading these: index (5), look-up, scale (8); and finding new ones: largest (4), scale (8), cell (16), look-up, sum
    with the bits (12), shift (8), as a byte (5). The largest of the signed moment needs magnitudes (8)."""
    if not (block := block_of(shape)):
        return 80
    largest = ELEMENTWISE_BYTES if block < SHORT_ROW else 4
    read = 5 + ELEMENTWISE_BYTES + 8
    written = largest + 8 + 16 + ELEMENTWISE_BYTES + 12 + 8 + 5
    return 80 + 2 * (read + written) + 8


def _muon_state(config: Optimizer, name: str, shape: Shape) -> tuple[StateKind, ...]:
    return (StateKind("momentum_buffer"),) if is_hidden_matrix(name, shape) else ADAM_MOMENTS


def _muon_moved(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 60 for a matrix: weight, momentum and update are read and written, the gradient and later the update
    read; pieces are copied before and after messages, both ways."""
    return 60 if is_hidden_matrix(name, shape) else _adamw_moved(config, name, shape)


def _muon_widened(config: Optimizer, name: str, shape: Shape) -> float:
    """Returns 4 for a matrix, whose direction takes the gradient's memory in fp32."""
    return 4 if is_hidden_matrix(name, shape) else 0


def _muon_flops(config: Optimizer, name: str, shape: Shape) -> float:
    if not is_hidden_matrix(name, shape):
        return 0.0
    rows, columns = shape[-2:]
    return newton_schulz_flops(rows, columns) / (rows * columns)


OPTIMIZERS: Registry[OptimizerEntry] = Registry(
    "optimizer",
    {
        "adamw": OptimizerEntry(
            "Adam with decoupled weight decay",
            "Loshchilov & Hutter 2019, algorithm 2",
            rule="phalanx.train.optimizers.adamw:adamw",
            state=_adamw_state,
            moved=_adamw_moved,
            options=("betas", "eps"),
        ),
        "sgd": OptimizerEntry(
            "stochastic gradient descent with momentum, also Nesterov's",
            "Sutskever et al. 2013, section 2",
            rule="phalanx.train.optimizers.sgd:sgd",
            state=_sgd_state,
            moved=_sgd_moved,
            options=("momentum", "nesterov"),
            defaults={"weight_decay": 1e-4},
        ),
        "lion": OptimizerEntry(
            "the sign of an interpolated momentum, with decoupled weight decay",
            "Chen et al. 2023, algorithm 2",
            rule="phalanx.train.optimizers.lion:lion",
            state=_lion_state,
            moved=_lion_moved,
            moved_on_cpu=_lion_moved_on_cpu,
            options=("betas", "eps"),
            defaults={"betas": (0.9, 0.99), "lr": 1e-4, "weight_decay": 1.0},
        ),
        "muon": OptimizerEntry(
            "orthogonalised momentum for the matrices of blocks, AdamW for the rest",
            "Jordan et al. 2024; Liu et al. 2025, section 2.2",
            rule="phalanx.train.optimizers.muon:muon",
            state=_muon_state,
            moved=_muon_moved,
            flops=_muon_flops,
            widened=_muon_widened,
            options=("momentum", "nesterov", "newton_schulz", "betas", "eps"),
            defaults={"momentum": 0.95, "nesterov": True},
            granularity="matrix",
            by_shape=True,
        ),
        "adamw8bit": OptimizerEntry(
            "AdamW whose moments have 8 bits and a scale per block of a row",
            "Dettmers et al. 2022, section 2",
            rule="phalanx.train.optimizers.adamw8bit:adamw8bit",
            state=_adamw8bit_state,
            moved=_adamw8bit_moved,
            options=("betas", "eps"),
            granularity="block",
            by_shape=True,
        ),
    },
    problems,
)
"""The optimizers by their names in `optimizer.name`."""


def entry_of(name: str) -> OptimizerEntry:
    """Returns the facts of an optimizer. Raises JobError with the nearest name if it is unknown."""
    if name not in OPTIMIZERS:
        raise JobError(f"no optimizer {name!r}{did_you_mean(name, OPTIMIZERS)} (known: {', '.join(OPTIMIZERS)})")
    return OPTIMIZERS[name]
