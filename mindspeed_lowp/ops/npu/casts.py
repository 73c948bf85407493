"""Casts on the NPU: torch_npu's for the element formats, the reference where it has none."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0, INT8
from mindspeed_lowp.ops import npu
from mindspeed_lowp.ops.reference import casts as reference

# The device does not round to E8M0, and int8 is no narrow float to it.
_BY_THE_REFERENCE = (E8M0.npu_code, INT8.npu_code)


def cast(x: Tensor, dst_type: int):
    if dst_type in _BY_THE_REFERENCE:
        return reference.cast(x, dst_type)
    return npu.torch_npu().npu_dtype_cast(x, dst_type)


def decode(codes: Tensor, src_type: int, dst_type: torch.dtype):
    if src_type in _BY_THE_REFERENCE:
        return reference.decode(codes, src_type, dst_type)
    return npu.torch_npu().npu_dtype_cast(codes, dst_type, input_dtype=src_type)
