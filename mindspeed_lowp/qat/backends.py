"""Which implementation fake-quantizes to MXFP4.

| backend  | what runs                                                                            |
|----------|--------------------------------------------------------------------------------------|
| `auto`   | the fastest for the tensor's device                                                  |
| `torch`  | elementwise PyTorch, on any device                                                   |
| `native` | the C++ kernels, on a CPU                                                            |
| `npu`    | the FakeQuant toolkit's compiled operator, on an NPU, found by `MXFP4_ASCENDC_PATH`  |

`auto` is the C++ kernels on a CPU (PyTorch where they were not built), the compiled operator on an NPU where
there is one, PyTorch everywhere else. The bits are the same, on an NPU with the restrictions that
`mindspeed_lowp.ops.quant_dequant_mxfp4` lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lowp.ops import kernels
from mindspeed_lowp.ops.npu import mxfp4 as npu
from mindspeed_lowp.ops.reference import mxfp4 as reference

BACKENDS = ("auto", "torch", "native", "npu")

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def quant_dequant_mxfp4(
    x: Tensor, block_size: int, scale_factor: float, scale_mode: str, backend: str
) -> Tensor:
    """x [..., N] on the MXFP4 grid, blocks along the last axis; contiguous, of x's shape and dtype.

    Raises ValueError for a tensor that cannot be quantized, and RuntimeError, saying what to do, for a
    backend that is not available to it.
    """
    if x.dtype not in _FLOATS:
        raise ValueError(f"x has dtype {x.dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() == 0:
        raise ValueError("x has 0 dimensions; at least 1 is needed, blocks lie along one")
    if backend == "torch":
        return reference.quant_dequant_mxfp4(x, scale_factor, block_size, scale_mode)
    if backend == "native":
        _check_native(x)
    elif backend == "npu":
        return _by_compiled_operator(x, block_size, scale_factor, scale_mode)
    return torch.ops.lowp.quant_dequant_mxfp4(x, scale_factor, block_size, scale_mode)


def _check_native(x: Tensor) -> None:
    if x.device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f'backend="native" is for CPU tensors, but x is on {x.device}: use backend="auto" or "torch"'
        )
    if not kernels.available():
        raise RuntimeError(
            'backend="native": the C++ kernels were not built: install a C++ compiler and reinstall '
            'mindspeed_lowp, or use backend="auto" or "torch"'
        )


def _by_compiled_operator(x: Tensor, block_size: int, scale_factor: float, scale_mode: str) -> Tensor:
    reason = npu.why_unsuitable(x, block_size, scale_mode)
    if reason:
        raise RuntimeError(f'backend="npu": {reason}; use backend="auto" or "torch"')
    reason = npu.why_unavailable()
    if reason:
        raise RuntimeError(
            f'backend="npu": the FakeQuant toolkit\'s compiled operator is not available: {reason}. Compile '
            "it (`bash build.sh` in mxfp4_ascendc), set MXFP4_ASCENDC_PATH to its folder `python` and start "
            'again, or use backend="auto" or "torch"'
        )
    try:
        return npu.compiled(x, scale_factor)
    except NotImplementedError as error:
        raise RuntimeError(
            f'backend="npu": the compiled operator takes no tensor on {x.device}; use backend="auto" '
            'or "torch"'
        ) from error
