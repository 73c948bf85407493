"""Fake quantization to MXFP4 and MXFP8, and quantization-aware training with it.

For any PyTorch model, names and defaults as the FakeQuant toolkit of hicann/amct has them::

    convert_to_mxfp4_qat(model, MXFP4QATConfig(quantize_input=True), skip_names=("lm_head",))

For layers that take a recipe, those of Megatron and grouped experts among them::

    convert_model(model, get_qat_recipe("w4a16-mxfp4"))
"""

from mindspeed_lowp.qat.config import MXFP4QATConfig
from mindspeed_lowp.qat.convert import convert_to_mxfp4_qat
from mindspeed_lowp.qat.embedding import MXFP4QATEmbedding
from mindspeed_lowp.qat.functional import mxfp4_fake_quant, mxfp4_quant_dequant, mxfp4_saturation_mask
from mindspeed_lowp.qat.grids import MXFP4Grid, MXFP8Grid
from mindspeed_lowp.qat.linear import MXFP4QATLinear
from mindspeed_lowp.qat.quantizer import FakeQuantizer, MXFP4FakeQuantizer
from mindspeed_lowp.qat.recipe import FakeQuantRecipe
from mindspeed_lowp.qat.schemes import SCHEMES, default_scale_mode, get_qat_recipe
from mindspeed_lowp.qat.straight_through import straight_through

__all__ = [
    "SCHEMES",
    "FakeQuantRecipe",
    "FakeQuantizer",
    "MXFP4FakeQuantizer",
    "MXFP4Grid",
    "MXFP4QATConfig",
    "MXFP4QATEmbedding",
    "MXFP4QATLinear",
    "MXFP8Grid",
    "convert_to_mxfp4_qat",
    "default_scale_mode",
    "get_qat_recipe",
    "mxfp4_fake_quant",
    "mxfp4_quant_dequant",
    "mxfp4_saturation_mask",
    "straight_through",
]
