"""MXFP4 fake quantization by the FakeQuant toolkit's operator, which users compile themselves."""

import importlib
import os
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, MX_BLOCK
from mindspeed_lowp.ops.reference import mxfp4 as reference

_LARGEST = 2**31 - 1  # elements of one call
_VARIABLE = "MXFP4_ASCENDC_PATH"


def why_unavailable() -> str | None:
    """Why there is no compiled operator; None if there is one, loaded by the user or found here."""
    return None if _registered() else _search()


@cache
def _search() -> str | None:
    """Import the package `mxfp4`, which registers the operator, and say what was in the way, if anything.

    It is looked for in the folder that MXFP4_ASCENDC_PATH names and in `python` below that; once.
    """
    named = os.environ.get(_VARIABLE)
    if not named:
        return f"{_VARIABLE} is not set"
    folder = next((f for f in (Path(named), Path(named, "python")) if (f / "mxfp4").is_dir()), None)
    if folder is None:
        return f"{_VARIABLE}={named} holds no folder mxfp4"
    sys.path.insert(0, str(folder))
    try:
        importlib.import_module("mxfp4")
    except Exception as error:  # whatever a library that does not fit this machine raises
        reason = f"importing mxfp4 from {folder} failed ({type(error).__name__}: {error})"
        warnings.warn(f"{reason}: MXFP4 fake quantization on an NPU is elementwise and slow", stacklevel=2)
        return reason
    finally:
        sys.path.remove(str(folder))
    return None if _registered() else f"the package mxfp4 in {folder} registered no operator"


def _registered() -> bool:
    return hasattr(torch.ops.amct, "quant_dequant_mxfp4")


def why_unsuitable(x: Tensor, block_size: int, scale_mode: str) -> str | None:
    """What of these arguments the compiled operator does not take; None if it takes them all."""
    if block_size != MX_BLOCK:
        return f"block_size={block_size}; it has blocks of {MX_BLOCK}"
    if scale_mode != "round":
        return f"scale_mode={scale_mode!r}; its scales are rounded"
    n = x.shape[-1]
    elements = x.numel() // max(n, 1) * (n + -n % MX_BLOCK)
    if elements > _LARGEST:
        return f"{elements} elements; it takes {_LARGEST} in a call"
    return None


def compiled(x: Tensor, scale_factor: float) -> Tensor:
    """By the compiled operator, which takes whole blocks of contiguous fp32 in one dimension."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -n % MX_BLOCK))  # each row, so that blocks do not cross
    flat = torch.ops.amct.quant_dequant_mxfp4(padded.reshape(-1).contiguous(), E2M1.max / scale_factor)
    return flat.view(padded.shape)[..., :n].to(x.dtype).contiguous()


def quant_dequant_mxfp4(x: Tensor, scale_factor: float, block_size: int, scale_mode: str = "round") -> Tensor:
    if why_unsuitable(x, block_size, scale_mode) or why_unavailable():
        return reference.quant_dequant_mxfp4(x, scale_factor, block_size, scale_mode)
    return compiled(x, scale_factor)
