"""Products of small fp32 matrices on one thread, through kernels that torch's library exports but not its Python.

They are oneDNN's kernel for one block of a product, as torch's headers declare it (ATen/native/CPUBlas.h), and fbgemm's
transposition, which is six times faster than torch's into rows that do not all begin in the same set of the cache. A
call from Python takes one microsecond, torch's own operators for such products ten. Both read and write parts of larger
matrices where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 512, 128, 512
"""Most rows and columns of a block of a product, and most terms of its sums that are added at once."""
UNIT, SMALLEST, LARGEST = 64, 2**23, 2**30
"""What sizes must be multiples of: the kernel compiles code, and keeps it, for each shape. And the fewest and the most
multiplications of a weight's gradient that is faster so (measured on an EPYC of the fifth generation: 2^25 take 0.7 to
0.8 of the time that oneDNN takes for the whole with a transposed copy, 2^29 0.9, 2^31 1.1)."""
PADDING = 16
"""Elements between the rows of a transposed copy, so that they do not begin in the same set of the cache."""


class SmallProducts:
    """The kernels."""

    def __init__(self, multiply: Callable[..., None], transpose: Callable[..., None]):
        self._multiply, self._transpose = multiply, transpose

    def add_weight_gradient(self, gradient: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Returns the gradient of a weight, gradientᵀ x (outputs, inputs), of (tokens, outputs) and (tokens, inputs),
        or adds it to `out`. None if another way is better: also for tensors without data."""
        sizes = gradient.shape[1], x.shape[1], len(x)
        fits = not any(size % UNIT for size in sizes) and SMALLEST <= prod(sizes) <= LARGEST
        all_three = (gradient, x, *([] if out is None else [out]))
        plain = type(x) is Tensor and x.is_cpu and {each.dtype for each in all_three} == {torch.float32}
        if not (fits and plain and all(map(_has_rows, all_three)) and torch.get_num_threads() == 1):
            return None
        adds = out is not None
        out = x.new_empty(sizes[:2]) if out is None else out
        rows, columns, sums = (list(_blocks(size, most)) for size, most in zip(sizes, BLOCK, strict=True))
        turned = x.new_empty(rows[0][1], sums[0][1] + PADDING)
        for (term, terms), (row, height) in product(sums, rows):
            self.transpose(turned[None, :height, :terms], gradient[None, term : term + terms, row : row + height])
            flags = _flag(adds or term > 0), _flag(False)
            for column, width in columns:
                shape = map(_number, (height, width, terms, turned.stride(0), x.stride(0), out.stride(0)))
                places = _place(turned, 0, 0), _place(x, term, column), _place(out, row, column)
                self._multiply(*shape, flags[0], *places, flags[1])
        return out

    def multiply(self, out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
        """Writes a b to `out`, or with `add` adds it: (heads, n, m) by (heads, m, l) to (heads, n, l), where several
        successive ones may meet the same of fewer heads."""
        factors, most = (a, b, out), max(len(a), len(b))
        assert all(x.stride(2) == 1 for x in factors), "rows without gaps"
        sizes = map(_number, (a.shape[1], b.shape[2], a.shape[2], a.stride(1), b.stride(1), out.stride(1)))
        places = [(_address(), x.data_ptr(), x.stride(0) * 4, most // len(x)) for x in factors]
        arguments = *sizes, _flag(add), *(place for place, *_ in places), _flag(False)
        for head in range(most):
            for place, start, step, each in places:
                place.value = start + head // each * step
            self._multiply(*arguments)

    def transpose(self, out: Tensor, x: Tensor) -> None:
        """Copies the transposed matrices `x` (heads, n, m), whose rows have no gaps, to `out` (heads, m, n)."""
        source, target = _address(), _address()
        arguments = *map(_number, x.shape[1:]), source, _number(x.stride(1)), target, _number(out.stride(1))
        for head in range(len(x)):
            source.value, target.value = (y.data_ptr() + head * y.stride(0) * 4 for y in (x, out))
            self._transpose(*arguments)

    def turned(self, x: Tensor) -> Tensor:
        """Returns the transposed matrices of `x` (heads, n, m), (heads, m, n), with gaps between the rows."""
        out = x.new_empty(len(x), x.shape[2], x.shape[1] + PADDING)[..., : x.shape[1]]
        self.transpose(out, x)
        return out


# Arguments that are C's already: converting them would take longer than a small product.
_number, _flag, _address = ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p


def _place(x: Tensor, row: int, column: int) -> ctypes.c_void_p:
    return _address(x.data_ptr() + x.element_size() * (row * x.stride(0) + column))


def _has_rows(x: Tensor) -> bool:
    """Returns whether the rows of a matrix have no gaps, and do not overlap."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _blocks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields the first element and the length of nearly equal parts."""
    length = -(-size // -(-size // most) // UNIT) * UNIT
    return ((start, min(length, size - start)) for start in range(0, size, length))


@cache
def small_products() -> SmallProducts | None:
    """Returns the kernels; None if this version of torch does not have them."""
    names = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb", "_ZN6fbgemm14transpose_simdIfEEvllPKT_lPS1_l"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        kernels = [library[name] for name in names]
    except (OSError, AttributeError):
        return None
    for kernel in kernels:
        kernel.restype = None
    return SmallProducts(*kernels)
