"""The quantization and quantized-matmul operators: those of `mindspeed_lowp.ops`, under torch_npu's names.

They have the parameters and refusals of torch_npu's, results in fresh memory, and no gradient: as there.
"""

from __future__ import annotations

from mindspeed_lowp import ops

npu_dynamic_mx_quant = ops.dynamic_mx_quant
npu_dynamic_mx_quant_with_dual_axis = ops.dynamic_mx_quant_with_dual_axis
npu_dynamic_block_mx_quant = ops.dynamic_block_mx_quant
npu_grouped_dynamic_mx_quant = ops.grouped_dynamic_mx_quant
npu_anti_mx_quant = ops.anti_mx_quant
npu_dynamic_quant = ops.dynamic_quant
npu_dynamic_block_quant = ops.dynamic_block_quant
npu_quantize = ops.quantize
npu_quant_matmul = ops.quant_matmul
npu_add_quant_matmul_ = ops.add_quant_matmul_
npu_add_quant_gmm_ = ops.add_quant_gmm_
