"""What is put into Megatron: parallel linears and experts with a recipe. Importing it imports Megatron."""

from mindspeed_lowp.megatron.convert import HIGH_PRECISION, convert_chunks
from mindspeed_lowp.megatron.linear import gather_quantized
from mindspeed_lowp.megatron.transformer_engine import grouped_mlp_modules_wrapper, transformer_engine_patches

__all__ = [
    "HIGH_PRECISION",
    "convert_chunks",
    "gather_quantized",
    "grouped_mlp_modules_wrapper",
    "transformer_engine_patches",
]
