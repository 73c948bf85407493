"""torch_npu's quantization operators on any device: its parameters, shapes, layouts and bits, minus ``npu_``.

On an Ascend 950 they are the torch_npu calls; on a CPU they are C++ kernels; elsewhere, the PyTorch
reference. They have no gradient: the layers' autograd functions call them.
"""

from mindspeed_lowp.ops.casts import (
    cast_e1m2,
    cast_e2m1,
    cast_e4m3,
    cast_e5m2,
    cast_e8m0,
    cast_hifloat8,
    cast_int8,
    decode_e1m2,
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    decode_hifloat8,
    decode_int8,
)
from mindspeed_lowp.ops.gmm import add_quant_gmm_, grouped_matmul
from mindspeed_lowp.ops.matmul import add_quant_matmul_, quant_matmul
from mindspeed_lowp.ops.mx_quant import (
    anti_mx_quant,
    dynamic_block_mx_quant,
    dynamic_mx_quant,
    dynamic_mx_quant_with_dual_axis,
    grouped_anti_mx_quant,
    grouped_dynamic_mx_quant,
)
from mindspeed_lowp.ops.mxfp4 import quant_dequant_mxfp4
from mindspeed_lowp.ops.scaled_quant import dynamic_block_quant, dynamic_quant, quantize

__all__ = [
    "add_quant_gmm_",
    "add_quant_matmul_",
    "anti_mx_quant",
    "cast_e1m2",
    "cast_e2m1",
    "cast_e4m3",
    "cast_e5m2",
    "cast_e8m0",
    "cast_hifloat8",
    "cast_int8",
    "decode_e1m2",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "decode_hifloat8",
    "decode_int8",
    "dynamic_block_mx_quant",
    "dynamic_block_quant",
    "dynamic_mx_quant",
    "dynamic_mx_quant_with_dual_axis",
    "dynamic_quant",
    "grouped_anti_mx_quant",
    "grouped_dynamic_mx_quant",
    "grouped_matmul",
    "quant_dequant_mxfp4",
    "quant_matmul",
    "quantize",
]
