"""The C++ kernels of `csrc`, called through ctypes. Where they were not built, importing this warns once.

`LOWP_CPU_LEVEL` (``v4``: AVX-512, ``v3``: AVX2, ``base``) forces a level; by default the CPU's highest is
used.
"""

import ctypes
import os
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2
from mindspeed_lowp.ops import layout

LEVELS = ("v4", "v3", "base")

# Enumerations of csrc/kernels.h.
_INPUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FORMAT = {E4M3.dtype: 0, E5M2.dtype: 1}

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "lowp_supports": [ctypes.c_char_p],
    "lowp_use": [ctypes.c_char_p],
    "lowp_mx_quant": [_POINTER] * 3 + [_INT64] * 3 + [_INT] * 4,
    "lowp_mx_quant_dual": [_POINTER] * 5 + [_INT64] * 3 + [_INT] * 4,
    "lowp_mx_quant_grouped": [_POINTER] * 4 + [_INT64] * 3 + [_INT] * 4,
    "lowp_mx_dequant": [_POINTER] * 3 + [_INT64] * 10 + [_INT] * 4,
}


def _load() -> ctypes.CDLL | None:
    reason = "it was installed where no C++ compiler was found"
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernels" + suffix)
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            reason = str(error)
            continue
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT if name == "lowp_supports" else None
        return library
    warnings.warn(
        f"mindspeed_lowp has no C++ kernels ({reason}): quantization on the CPU uses PyTorch and is slow. "
        "Install a C++ compiler, then reinstall mindspeed_lowp.",
        stacklevel=2,
    )
    return None


_library = _load()


def available() -> bool:
    """Whether the library was found. If not, nothing else here may be called."""
    return _library is not None


def supported_levels() -> list[str]:
    """The levels that were built and that this CPU can run, best first."""
    return [level for level in LEVELS if available() and _library.lowp_supports(level.encode())]


def use_level(level: str) -> None:
    """Use the kernels of this level from now on.

    Raises:
        ValueError: if it was not built or the CPU cannot run it.
    """
    accepted = supported_levels()
    if level not in accepted:
        raise ValueError(
            f"CPU level {level!r} (LOWP_CPU_LEVEL) is not supported here; use {' or '.join(accepted)}"
        )
    _library.lowp_use(level.encode())


if available():
    use_level(os.environ.get("LOWP_CPU_LEVEL") or supported_levels()[0])


def dynamic_mx_quant(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dst_type)
    mxscale = torch.empty(layout.scale_shape(x.shape, axis), dtype=torch.uint8)
    _library.lowp_mx_quant(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        *layout.collapse(x.shape, axis),
        _INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y, mxscale


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    last = x.dim() - 1
    y1, y2 = torch.empty(x.shape, dtype=dst_type), torch.empty(x.shape, dtype=dst_type)
    mxscale1 = torch.empty(layout.scale_shape(x.shape, last), dtype=torch.uint8)
    mxscale2 = torch.empty(layout.scale_shape(x.shape, last - 1), dtype=torch.uint8)
    _library.lowp_mx_quant_dual(
        x.data_ptr(),
        y1.data_ptr(),
        mxscale1.data_ptr(),
        y2.data_ptr(),
        mxscale2.data_ptr(),
        *layout.collapse(x.shape, last - 1),
        _INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y1, mxscale1, y2, mxscale2


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor]:
    ends = layout.group_index_ends(group_index, x.shape[0])
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dst_type)
    mxscale = torch.zeros(layout.grouped_scale_shape(x.shape, len(ends)), dtype=torch.uint8)
    _library.lowp_mx_quant_grouped(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        (_INT64 * len(ends))(*ends),
        len(ends),
        *x.shape,
        _INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y, mxscale


def anti_mx_quant(x: Tensor, mxscale: Tensor, axis: int, dst_type: torch.dtype) -> Tensor:
    if dst_type not in (torch.bfloat16, torch.float32):
        return anti_mx_quant(x, mxscale, axis, torch.float32).to(dst_type)
    out = torch.empty(x.shape, dtype=dst_type)
    if x.dim() == 2 and (x.stride(1) == 1 or x.stride(0) == 1):
        # The operand of a matmul, perhaps a transposed view: read as it lies.
        shape, strides = (1, *x.shape), (0, *x.stride())
        scale_strides = mxscale.stride()
        scale_strides = (0, scale_strides[axis], scale_strides[1 - axis], scale_strides[2])
    else:
        x, mxscale = x.contiguous(), mxscale.contiguous()
        batch, rows, cols = layout.collapse(x.shape, axis)
        pairs = -(-rows // layout.PAIR)
        if cols == 1:  # blocks along the last axis: the rest are lines
            shape, strides, axis = (1, batch, rows), (0, rows, 1), 1
            scale_strides = (0, 2, 2 * pairs, 1)
        else:
            shape, strides, axis = (batch, rows, cols), (rows * cols, cols, 1), 0
            scale_strides = (pairs * cols * 2, 2 * cols, 2, 1)
    _library.lowp_mx_dequant(
        x.data_ptr(),
        mxscale.data_ptr(),
        out.data_ptr(),
        *shape,
        *strides,
        *scale_strides,
        axis,
        _FORMAT[x.dtype],
        _INPUT[dst_type],
        torch.get_num_threads(),
    )
    return out
