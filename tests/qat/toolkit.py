"""The FakeQuant toolkit's rules, transcribed in plain PyTorch: no line is shared with the package."""

import torch
from torch import Tensor


def toolkit(x: Tensor, block_size: int = 32, scale_factor: float = 6.0) -> Tensor:
    """Quantize-dequantize to MXFP4, rule by rule."""
    return _by_block(x, block_size, scale_factor)[0]


def toolkit_saturates(x: Tensor, block_size: int = 32, scale_factor: float = 6.0) -> Tensor:
    return _by_block(x, block_size, scale_factor)[1]


def _by_block(x: Tensor, block_size: int, scale_factor: float) -> tuple[Tensor, Tensor]:
    values, beyond = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.bool)
    for first in range(0, x.shape[-1], block_size):
        block = x[..., first : first + block_size].float()
        amax = block.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.round(torch.log2(torch.clamp(amax / scale_factor, min=2.0**-30))))
        scaled = (block / scale).abs()
        code = torch.zeros_like(scaled)
        for midpoint, above in zip(MIDPOINTS, CODES[1:], strict=True):
            code = torch.where(scaled >= midpoint, above, code)
        values[..., first : first + block_size] = torch.sign(block / scale) * code * scale
        beyond[..., first : first + block_size] = block.abs() > 6 * scale
    return values.to(x.dtype), beyond


CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
