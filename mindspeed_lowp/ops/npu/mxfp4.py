"""MXFP4 fake quantization by the FakeQuant toolkit's operator, which users compile and load themselves."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, MX_BLOCK
from mindspeed_lowp.ops.reference import mxfp4 as reference

_LARGEST = 2**31 - 1  # elements of one call


def quant_dequant_mxfp4(x: Tensor, scale_factor: float, block_size: int) -> Tensor:
    n = x.shape[-1]
    padding = -n % MX_BLOCK
    elements = x.numel() // max(n, 1) * (n + padding)
    compiled = hasattr(torch.ops.amct, "quant_dequant_mxfp4")
    if not compiled or block_size != MX_BLOCK or not 0 < elements <= _LARGEST:
        return reference.quant_dequant_mxfp4(x, scale_factor, block_size)
    # It takes whole blocks of contiguous fp32 in one dimension: each row is padded first.
    padded = torch.nn.functional.pad(x.float(), (0, padding))
    flat = torch.ops.amct.quant_dequant_mxfp4(padded.reshape(-1).contiguous(), E2M1.max / scale_factor)
    return flat.view(padded.shape)[..., :n].to(x.dtype).contiguous()
