"""What every layer demands of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def check_dtypes(caller: str, **tensors: Tensor | None) -> None:
    """Raise ValueError naming the tensor that is neither bf16, fp16 nor fp32."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _QUANTIZABLE:
            raise ValueError(f"{caller}: {name} has dtype {tensor.dtype}; expected bf16, fp16 or fp32")
