"""`torch_npu.contrib.transfer_to_npu`: importing it sends code written for CUDA to the NPU.

Most of it is what `mindspeed_lowp.runtime` does anyway. Left to do: the device's name, tensor types, and what
the original switches off.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lowp.emulator.npu import _TYPES


def transfer(npu: Any) -> None:
    torch.cuda.get_device_name = npu.get_device_name
    for name in _TYPES:
        setattr(torch.cuda, name, getattr(npu, name))
    torch.jit.script = torch.jit.script_method = _not_scripted


def _not_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function
