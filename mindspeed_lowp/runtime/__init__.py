"""What lets Megatron run on a machine with neither CUDA nor an NPU.

`install()` makes the process look to Megatron like one with a single CUDA device, whose memory is the
host's and whose kernels are PyTorch's CPU kernels. It follows `torch_npu.contrib.transfer_to_npu`: names
are redirected, the training script and Megatron's files stay as they are.

    device         torch.cuda calls, streams and events, `device="cuda"`, `.cuda()`
    random_state   the CUDA generator, separate from the host's
    distributed    NCCL process groups become gloo ones
    gemm           fast bf16 and fp16 matrix products on CPUs without bf16 instructions
    megatron       norms, fused kernels, optimizer state: what Megatron takes from Apex or CUDA
"""

from __future__ import annotations

import importlib.util

import torch

from mindspeed_lowp.ops.gemm import bf16_gemm_is_native

_installed = False
_megatron_is_patched = False


def install() -> None:
    """Install the runtime; do nothing where CUDA or an NPU is really there, or when called again.

    It imports Megatron where that is installed. Normally nothing has imported Megatron before.
    """
    global _megatron_is_patched
    install_device()
    if not _installed or _megatron_is_patched or importlib.util.find_spec("megatron") is None:
        return
    _megatron_is_patched = True

    from mindspeed_lowp.runtime import megatron

    megatron.install()


def install_device() -> None:
    """The same without what Megatron takes from Apex or CUDA, which MindSpeed supplies itself."""
    global _installed
    if _installed or has_accelerator():
        return
    _installed = True

    from mindspeed_lowp.runtime import device, distributed, gemm, random_state

    device.install()
    random_state.install()
    distributed.install()
    if not bf16_gemm_is_native():
        gemm.install()


def is_installed() -> bool:
    """True where `install()` found no accelerator and emulates one."""
    return _installed


def has_accelerator() -> bool:
    """True where a CUDA device or an Ascend NPU can be used; the emulated one does not count."""
    if _installed:
        return False
    return torch.cuda.is_available() or (hasattr(torch, "npu") and torch.npu.is_available())
