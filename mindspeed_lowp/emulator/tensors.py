"""What tensors on an NPU can do and those on a CPU cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Give tensors and modules `npu()`, and `addmm_` its mixed precision."""
    for owner in (torch.Tensor, torch.nn.Module):
        owner.npu = lambda self, *args, **kwargs: self
    torch.Tensor.addmm_ = _into_fp32(torch.Tensor.addmm_)


def _into_fp32(addmm_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An fp32 sum takes products of bf16 or fp16 matrices, none of which is rounded."""

    @functools.wraps(addmm_)
    def wrapper(self: Tensor, mat1: Tensor, mat2: Tensor, **scalars: Any) -> Tensor:
        if self.dtype == torch.float32:
            mat1, mat2 = mat1.float(), mat2.float()
        return addmm_(self, mat1, mat2, **scalars)

    return wrapper
