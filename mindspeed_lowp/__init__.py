"""Low-precision training for Megatron and MindSpeed: MXFP8 on Ascend 950, emulated bit by bit on CPU and GPU.

>>> from mindspeed_lowp import get_recipe, lowp_linear
>>> recipe = get_recipe("mxfp8", fp8_format="e4m3", defer_backward_quant=True)
>>> y = lowp_linear(x, weight, bias, recipe)  # doctest: +SKIP
"""

from mindspeed_lowp.layers import (
    MoETrainingConfig,
    MXLinear,
    MXLinearConfig,
    convert_model,
    grouped_quantize_,
    linear_quantize_,
    lowp_grouped_linear,
    lowp_linear,
)
from mindspeed_lowp.recipes import get_recipe, register_recipe

__all__ = [
    "MXLinear",
    "MXLinearConfig",
    "MoETrainingConfig",
    "convert_model",
    "get_recipe",
    "grouped_quantize_",
    "linear_quantize_",
    "lowp_grouped_linear",
    "lowp_linear",
    "register_recipe",
]
