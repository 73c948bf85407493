"""Casts between dtypes, the formats that torch has no dtype for included, and between memory formats."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import FORMATS, FormatInfo

_TORCH_DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16,
    6: torch.float32, 7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
_FORMATS = {info.npu_code: info for info in FORMATS if info.npu_code > max(_TORCH_DTYPES)}
_FORMATS |= {info.dtype: info for info in _FORMATS.values() if info.dtype != torch.uint8}


def npu_dtype_cast(
    self: Tensor, dtype: torch.dtype | int, input_dtype: torch.dtype | int | None = None
) -> Tensor:
    """self in another dtype, with the gradient of a cast.

    dtype: torch's, its number, or torch_npu's code. Narrow formats saturate as on the NPU, and travel as
        uint8 where torch has no dtype for them.
    input_dtype: what the codes in self are, where their dtype does not say it.
    """
    source = _FORMATS.get(self.dtype if input_dtype is None else input_dtype)
    if source is not None:
        self = getattr(ops, f"decode_{_name(source)}")(self)
    target = _FORMATS.get(dtype)
    if target is not None:
        return _CastToNarrow.apply(self, target)
    return self.to(_TORCH_DTYPES.get(dtype, dtype))


def npu_format_cast(self: Tensor, acl_format: int | Tensor, **options: object) -> Tensor:
    """self: how an NPU lays a tensor out in memory is not emulated, and makes no difference to values."""
    return self


def npu_format_cast_(self: Tensor, acl_format: int | Tensor, **options: object) -> Tensor:
    return self


class _CastToNarrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, target: FormatInfo) -> Tensor:
        ctx.dtype = x.dtype
        return getattr(ops, f"cast_{_name(target)}")(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _name(info: FormatInfo) -> str:
    return {"hif8": "hifloat8"}.get(info.name, info.name)
