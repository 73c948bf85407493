"""Low-precision training for Megatron and MindSpeed: MXFP8 on Ascend 950, emulated bit by bit on CPU and GPU.

>>> from mindspeed_lowp import get_recipe, lowp_linear
>>> recipe = get_recipe("mxfp8", fp8_format="e4m3", defer_backward_quant=True)
>>> y = lowp_linear(x, weight, bias, recipe)  # doctest: +SKIP
"""

from importlib.util import find_spec

if find_spec("mindspeed_lowp.recipes") is None:  # in the source tree it stands elsewhere, see setup.py
    raise ImportError(
        f"mindspeed_lowp is imported from its source tree ({__path__[0]}), not from where it is installed: "
        "work outside of that folder, or run `pip install -e .` there"
    )

from mindspeed_lowp import emulator
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

emulator.install_if_asked()
