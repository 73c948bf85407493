"""A module named `torch_npu` on machines without one, so that code written for Ascend runs on a CPU.

`install()` puts it in place, never over a real one. Its NPU is the device of `mindspeed_lowp.runtime` under
the name "npu": one for each process, its memory that of the host, its kernels those of PyTorch's CPU backend.

    dtypes         the formats that torch has no dtype for
    quantization   quantized operators: `mindspeed_lowp.ops` under their torch_npu names, with the NPU's bits
    norms, activations, rotary, attention, moe, grouped_matmul, casts, optimizer
                   the other operators that MindSpeed's GPT path calls, in plain PyTorch: the documented
                   contract, with gradients; computed in fp32 and rounded once, not the NPU's bits
    npu            torch.npu: devices, streams, memory, random state
    tensors, profiler, transfer, torchair, library
                   what there is beside operators

What is not here is not made up: asking for it raises NotImplementedError with its name.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from mindspeed_lowp.emulator.device_name import device_name, set_device_name

__all__ = ["device_name", "install", "install_if_asked", "is_installed", "set_device_name"]

#: The environment variable that asks for the emulator: 1, or the name of the NPU to emulate.
VARIABLE = "LOWP_EMULATE_NPU"

_installed = False


def install(name: str | None = None) -> None:
    """Let `import torch_npu` find the emulator. Calling it again only changes the name.

    name: what `torch_npu.npu.get_device_name()` answers; an Ascend 950 by default. Features ask it whether
        the NPU computes MXFP8 itself, so an older name shows what users of an older NPU will see.

    Raises RuntimeError where torch_npu is installed, or an accelerator is there: it would be hidden.
    """
    global _installed
    if not _installed:
        _check_nothing_is_hidden()
        from mindspeed_lowp.emulator import library

        library.install()
        _installed = True
    if name is not None:
        set_device_name(name)


def install_if_asked() -> None:
    """Install the emulator where the environment says so: `LOWP_EMULATE_NPU=1`, or `=Ascend910B3`."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0"):
        install(None if value == "1" else value)


def is_installed() -> bool:
    return _installed


def _check_nothing_is_hidden() -> None:
    from mindspeed_lowp import runtime

    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError(
            f"torch_npu is installed here, and the emulator would hide it: leave out --emulate-npu and "
            f"{VARIABLE}, or use an environment without torch_npu"
        )
    if runtime.has_accelerator():
        raise RuntimeError(
            "there is a CUDA device here, and the emulated NPU would hide it: set CUDA_VISIBLE_DEVICES= "
            f"(empty), or leave out --emulate-npu and {VARIABLE}"
        )
