"""Recomputation: activations are recomputed in the backward pass instead of being saved in the forward pass.

Each block has a mode of its own (partition/derived.py). `full` saves only the block's input (Chen et al. 2016);
`selective` saves everything but the inside of the attention core, which is large and cheap to repeat (Korthikanti et
al. 2022, section 5); `products` saves the results of matrix products, of attention and of collectives, and repeats
norms and activations (as the selective checkpointing by operator of torchtitan, Liang et al. 2024, section 2.1.3);
`mlp` repeats the first matrices of MLPs and experts, too, whose results are the widest of a block: the products that
take the fewest seconds per byte.
Dropout masks are functions of seed, step and sample (model/seeding.py), so the second pass gets the same ones without
saved generator state.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from phalanx.blocks.feed_forward import repeats_mlp
from phalanx.blocks.operator import Place
from phalanx.config.layout import Layout
from phalanx.model.attention import CoreAttention
from phalanx.model.layers import MLP, uncompiled
from phalanx.model.moe import Experts, MixtureOfExperts
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.compiled import fused
from phalanx.partition.derived import recompute_of, splits_backward

NORMS = nn.RMSNorm, nn.LayerNorm


def recompute(model: Transformer, layout: Layout, *, compiled: bool = False) -> int:
    """Makes each block of `model`, its attention core, or its norms and activations recompute if the layout says so for
    its layer. Returns the number of blocks, or of cores. `compiled`: blocks are to be compiled."""
    modules: list[Block | CoreAttention] = []
    kept = 0
    for layer, block in model.blocks.items():
        mode = recompute_of(layout, int(layer), model.config.n_layers)
        assert isinstance(block, Block), "nothing wraps blocks before this"
        if mode == "full":
            modules.append(block)
        elif mode == "selective":
            modules += [module for module in block.modules() if isinstance(module, CoreAttention)]
        elif mode in ("products", "mlp"):
            kept += 1
            _keep_products(block, compiled)
            if mode == "mlp" and repeats_mlp(Place(model.config, sp=layout.sp)):
                # A graph that ends within, at a collective or a gradient that is put off, cannot be traced as repeated.
                whole = layout.tp == 1 and not splits_backward(layout)
                dense, experts = (run_traced if whole else run_again, run_beside) if compiled else (run_cheap,) * 2
                for module in block.modules():
                    if isinstance(module, (MLP, Experts)):
                        vars(module)["run_hidden"] = experts if isinstance(module, Experts) else dense
    for module in modules:
        module.run = run_again
    return len(modules) + kept


def run_traced(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns `compute(*inputs)` and saves only `inputs`: the backward pass recomputes the rest."""
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


@uncompiled
def run_again(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """As `run_traced`, outside of what is compiled."""
    return run_traced(compute, *inputs)


def _keep_products(block: Block, compiled: bool) -> None:
    """Makes a block repeat its norms, its activations and what else it calls through `run_cheap`: as parts of compiled
    graphs, or beside these, as rows of experts."""
    inside, beside, activation = (run_traced, run_beside, _run_fused()) if compiled else (run_cheap,) * 3
    modules = [*block.modules()]
    if not compiled or any(isinstance(module, Experts) for module in modules):
        block.run = run_keeping_products
    for module in modules:
        if isinstance(module, NORMS):
            vars(module)["forward"] = MethodType(_normed(inside), module)
        elif hasattr(module, "run_cheap"):
            experts = beside if isinstance(module, MixtureOfExperts) else activation
            vars(module)["run_cheap"] = experts if isinstance(module, (Experts, MixtureOfExperts)) else inside


@cache
def _run_fused() -> Callable[..., Any]:
    """Returns `run_beside` for elementwise operations, which become one kernel."""
    compiled = fused()
    return uncompiled(lambda compute, *inputs: run_cheap(partial(compiled, compute), *inputs))


@cache
def _normed(run: Callable[..., Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Returns the forward pass of norms, by `run`: one function, so that compiled blocks share a graph."""
    return lambda norm, x: run(partial(type(norm).forward, norm), x)


def run_keeping_products(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns `compute(*inputs)`; of what it runs through `run_cheap` the backward pass repeats everything."""
    if not torch.is_grad_enabled():
        return compute(*inputs)
    with _Products():
        return compute(*inputs)


def run_cheap(compute: Callable[..., Any], *inputs: Any) -> Any:
    """Returns `compute(*inputs)`, a tensor or several. Inside `run_keeping_products` neither what it saves for its
    backward pass nor its results, which other operations save, stay: they are computed again from `inputs`."""
    products = _running.products
    if products is None:
        return compute(*inputs)
    repeated = Repeated(compute, [products.keep(each) if isinstance(each, Tensor) else each for each in inputs])
    _running.products = None  # what runs inside is repeated with it
    try:
        with saved_tensors_hooks(repeated.pack, products.unpack):
            results = compute(*inputs)
    finally:
        _running.products = products
    for number, result in enumerate(_tensors(results)):
        products.add(repeated, number, result)
    return results


run_beside = uncompiled(run_cheap)
"""As `run_cheap`, outside of what is compiled."""


class _Running(threading.local):
    products: _Products | None = None
    """The pass of a block that this thread computes."""


_running = _Running()


class _Products(saved_tensors_hooks):
    """One forward pass of a block: what it saves stays, except for results of computations that are repeated."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        # Hooks around this pass, such as those of offloaded activations, which autograd would not call.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyrefly: ignore[implicit-import]
        self.outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] = outer or (_same, _same)
        self.results: dict[int, tuple[Repeated, int, int, StorageWeakRef]] = {}
        """By storage: the computation, the number of its result, the result's version, and what keeps the key from
        being used again."""

    def __enter__(self) -> None:
        _running.products = self
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _running.products = None
        self.results = {}  # autograd keeps this object: what it refers to would stay with it

    def add(self, repeated: Repeated, number: int, result: Tensor) -> None:
        """Notes a result of a computation that is repeated."""
        weak = StorageWeakRef(result.untyped_storage())
        self.results.setdefault(weak.cdata, (repeated, number, result._version, weak))

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd keeps in place of a tensor that it saves."""
        repeated, number, version, _ = self.results.get(tensor.untyped_storage()._cdata, (None, 0, 0, None))
        if repeated is None or tensor._version != version:
            return self.outer[0](tensor)
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return repeated.view(_Entry("result", number), tensor.dtype, place)

    def unpack(self, packed: Any) -> Tensor:
        """Returns a saved tensor for the backward pass."""
        return packed.tensor() if isinstance(packed, _View) else self.outer[1](packed)

    def keep(self, tensor: Tensor) -> _Input:
        """Returns what a repeated computation keeps of a tensor that it reads."""
        return _Input(self.pack(tensor.detach()), self.unpack, tensor.requires_grad)


class Repeated:
    """A computation of a forward pass that runs again when the backward pass first needs one of its tensors."""

    def __init__(self, compute: Callable[..., Any], inputs: list[Any]):
        self.compute, self.inputs = compute, inputs
        self.saved = 0
        """Number of the tensors that it saves."""
        self.left = Counter[_Entry]()
        """How often the backward pass still needs each tensor."""
        self.found: dict[_Entry, Tensor] = {}

    def pack(self, tensor: Tensor) -> _View:
        """Returns what autograd keeps in place of the next tensor that the computation saves."""
        self.saved += 1
        return self.view(_Entry("saved", self.saved - 1), tensor.dtype)

    def view(self, entry: _Entry, dtype: torch.dtype, place: _Place | None = None) -> _View:
        """Returns what autograd keeps in place of a tensor, or of its view at `place` in memory."""
        self.left[entry] += 1
        return _View(self, entry, dtype, place)

    def take(self, entry: _Entry) -> Tensor:
        """Returns a tensor, and gives it up after its last use."""
        if entry not in self.found:
            self.repeat()
        self.left[entry] -= 1
        return self.found[entry] if self.left[entry] > 0 else self.found.pop(entry)

    def repeat(self) -> None:
        saved: list[Tensor | None] = []

        def keep(tensor: Tensor) -> None:
            needed = self.left[_Entry("saved", len(saved))] > 0
            saved.append(tensor.detach() if needed else None)

        inputs = [each.tensor() if isinstance(each, _Input) else each for each in self.inputs]
        with torch.enable_grad(), saved_tensors_hooks(keep, _same):
            results = self.compute(*inputs)
        assert len(saved) == self.saved, "a repeated computation saves as many tensors as the first"
        for kind, tensors in (("saved", saved), ("result", [result.detach() for result in _tensors(results)])):
            for number, tensor in enumerate(tensors):
                if tensor is not None and self.left[entry := _Entry(kind, number)] > 0:
                    self.found[entry] = tensor


class _Entry(NamedTuple):
    """A tensor of a computation: of those that it saves ("saved"), or of its results ("result"), the one with this
    number."""

    kind: str
    number: int


_Place = tuple[torch.Size, tuple[int, ...], int]
"""Size, strides and offset of a view."""


class _View(NamedTuple):
    """What autograd keeps in place of a tensor of a repeated computation, or of a view of it."""

    repeated: Repeated
    entry: _Entry
    dtype: torch.dtype
    place: _Place | None

    def tensor(self) -> Tensor:
        tensor = self.repeated.take(self.entry)
        return tensor if self.place is None else tensor.view(self.dtype).as_strided(*self.place)


class _Input(NamedTuple):
    """A tensor that a repeated computation reads."""

    packed: Any
    unpack: Callable[[Any], Tensor]
    needs_gradient: bool

    def tensor(self) -> Tensor:
        return self.unpack(self.packed).detach().requires_grad_(self.needs_gradient)


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _same(tensor: Any) -> Any:
    return tensor
