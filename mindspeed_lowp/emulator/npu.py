"""`torch.npu`: the one emulated device, as `mindspeed_lowp.runtime` gives it to `torch.cuda`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from mindspeed_lowp.emulator.device_name import device_name
from mindspeed_lowp.emulator.missing import refusing
from mindspeed_lowp.runtime.device import device_functions

# Functions of torch.cuda's random module, which reach the device's generator through `default_generators`.
_RANDOM = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "initial_seed",
    "get_rng_state",
    "get_rng_state_all",
    "set_rng_state",
    "set_rng_state_all",
)
_TYPES = (
    "FloatTensor",
    "DoubleTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "ByteTensor",
    "CharTensor",
    "ShortTensor",
    "IntTensor",
    "LongTensor",
    "BoolTensor",
)


def create() -> ModuleType:
    """The module that becomes `torch.npu` and `torch_npu.npu`."""
    functions = device_functions()
    npu = ModuleType("torch_npu.npu", "The NPU of mindspeed_lowp's emulator: this machine's CPU.")
    vars(npu).update(functions)
    vars(npu).update({name: getattr(torch.cuda, name) for name in _RANDOM})
    vars(npu).update({name: getattr(torch, name) for name in _TYPES})
    vars(npu).update(
        get_device_name=device_name,
        default_generators=torch.cuda.default_generators,
        init=_nothing,
        _lazy_init=_nothing,
        _lazy_call=lambda call, **_: call(),
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        memory_stats=lambda device=None: {"num_alloc_retries": 0},
        reset_max_memory_allocated=_nothing,
        # How kernels are compiled and scheduled, which makes no difference to values.
        set_compile_mode=_nothing,
        set_option=_nothing,
        __getattr__=refusing("torch_npu.npu"),
    )
    return npu


def install(npu: ModuleType) -> None:
    """Make "npu" a device name, and `torch.npu` the module."""
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    # For the name alone PyTorch looks for an accelerator's C++ half; there is none, tensors are on the CPU.
    torch._C._get_accelerator = lambda check=None: torch.device("cpu")
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
