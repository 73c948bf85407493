"""The casts' kernels."""

from functools import cache

import torch
from torch import Tensor

from mindspeed_lowp.formats import FORMATS, FormatInfo, format_of
from mindspeed_lowp.ops.kernels import INPUT, INT, INT64, POINTER, function
from mindspeed_lowp.ops.reference import casts as reference

_encode = function("lowp_cast_encode", [POINTER] * 2 + [INT64] + [INT] * 3)
_look_up = function("lowp_cast_look_up", [POINTER] * 3 + [INT64] + [INT] * 2)


def cast(x: Tensor, dst_type: int) -> Tensor:
    info = format_of(dst_type, FORMATS)
    x = x.contiguous()
    shape = [*x.shape[:-1], x.shape[-1] // 2] if info.bits == 4 else x.shape
    y = torch.empty(shape, dtype=info.dtype)
    _encode(x.data_ptr(), y.data_ptr(), x.numel(), INPUT[x.dtype], info.npu_code, torch.get_num_threads())
    return y


@cache
def _table(info: FormatInfo, dtype: torch.dtype) -> Tensor:
    """The values of each byte: one, or two of the 4-bit formats."""
    return reference.decode(torch.arange(256).to(torch.uint8)[:, None], info.npu_code, dtype)


def decode(codes: Tensor, src_type: int, dst_type: torch.dtype) -> Tensor:
    info = format_of(src_type, FORMATS)
    codes, table = codes.contiguous(), _table(info, dst_type)
    shape = [*codes.shape[:-1], codes.shape[-1] * 2] if info.bits == 4 else codes.shape
    out = torch.empty(shape, dtype=dst_type)
    _look_up(
        codes.data_ptr(),
        table.data_ptr(),
        out.data_ptr(),
        codes.numel(),
        table.shape[1] * table.element_size(),
        torch.get_num_threads(),
    )
    return out
