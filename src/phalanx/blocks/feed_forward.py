"""Feed-forward layers: a dense MLP, with or without a gate (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.blocks.lora import saved_input
from phalanx.blocks.operator import PLAIN, MemoryBound, Operator, SavedTensor, Weight
from phalanx.blocks.place import Place
from phalanx.blocks.residual import enter, leave, linear_weights, needs_sum
from phalanx.config.model import ModelConfig

ROWS, COLUMNS = PLAIN._replace(cut="rows"), PLAIN._replace(cut="columns")
CLAMPED_KERNELS = 7


def dense(place: Place) -> Iterator[Operator]:
    """Yields the operators of a dense MLP."""
    read = saved_input(place, "feed_forward", "mlp.up", "mlp.gate")
    up, activation, down = mlp(place, "mlp", place.model.ff_size, place.tokens, tiled=True)
    yield Operator(
        up.name,
        up.weights,
        up.rows,
        saved=(SavedTensor("up", size := place.model.d_model * read, "gathered", cheap=place.repeats_input(size)),),
        results=gate_result(place, place.model.ff_size),
        messages=tuple(enter(place, regather=bool(read))),
    )
    yield activation
    # The sum of a frozen matrix's outputs, or of tiles', saves nothing of its own.
    again = not (place.model.lora.rank or "mlp" in place.tiled) or needs_sum(place.model)
    yield replace(down, results=down_result(place)).sending(*leave(place, again=again))


def gate_result(place: Place, width: int) -> tuple[SavedTensor]:
    """Returns the result of the matrix with the gate, `width` numbers per token."""
    return (SavedTensor("gate", width * place.width, "width"),)


def down_result(place: Place) -> tuple[SavedTensor]:
    """Returns the result of the last matrix, after its reduce-scatter."""
    return (SavedTensor("down", place.model.d_model * place.width, "tokens"),)


def mlp(place: Place, name: str, width: int, rows: int, *, tiled: bool = False) -> tuple[Operator, Operator, Operator]:
    """Returns the matrices of an MLP of hidden size `width` over `rows` tokens, and the activation between them. The
    second matrix saves the inputs of the activation and its own."""
    model = place.model
    hidden = max(1, width // place.tp)
    gated = model.gated
    inner = rows * hidden
    return (
        Operator(f"{name}.up", up_weights(model, name, width, tiled=tiled), rows),
        Operator(
            f"{name}.activation",
            memory_bound=(
                MemoryBound(
                    f"{name}.activation",
                    (3 if gated else 2) * inner,
                    (5 if gated else 3) * inner,
                    CLAMPED_KERNELS if model.activation == "swiglu_clamped" else 2,
                    cheap=True,
                ),
            ),
        ),
        Operator(
            f"{name}.down",
            down_weights(model, name, width, tiled=tiled),
            rows,
            saved=(hidden_saved(place, name, width),),
        ),
    )


def up_weights(model: ModelConfig, name: str, width: int, *, tiled: bool = False) -> tuple[Weight, ...]:
    """Returns the weights that read the residual stream: one matrix, or two with a gate."""
    kind = ROWS._replace(tiled=tiled)
    weights = linear_weights(f"{name}.up", width, model.d_model, model.bias, kind)
    if model.gated:
        weights += linear_weights(f"{name}.gate", width, model.d_model, model.bias, kind)
    return weights


def down_weights(model: ModelConfig, name: str, width: int, *, tiled: bool = False) -> tuple[Weight, ...]:
    """Returns the weights that write to the residual stream."""
    kind = COLUMNS._replace(tiled=tiled)
    weight, *bias = linear_weights(f"{name}.down", model.d_model, width, model.bias, kind, cuts_bias=False)
    # In a mixture of experts gates multiply the bias, so each rank computes a part of its gradient.
    return weight, *(one._replace(gradient="tokens" if name == "mlp" else "partial") for one in bias)


def hidden_saved(place: Place, name: str, width: float) -> SavedTensor:
    """Returns what the MLP `name` saves between its matrices, of `width` numbers per token. Only what its first
    matrices write is not computed again."""
    size = hidden_bytes(place, name)
    return SavedTensor(name, width * size, "width", cheap=width * (size - (1 + place.model.gated) * place.width))


def hidden_bytes(place: Place, name: str) -> int:
    """Returns the bytes per element of the hidden size that the MLP `name` saves: the inputs of the activation, of the
    last matrix and, of a gate that is not computed again, its result."""
    tensors = place.profile.swiglu_kept if place.model.gated else 2
    if place.model.activation == "swiglu_clamped":
        tensors = min(tensors, 3)
    down = f"{name}.down" if name == "mlp" else f"moe.{name}.down"
    return (tensors - 1) * place.width + saved_input(place, "feed_forward", down)
