"""The module `torch_npu` itself, put together from the parts beside."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mindspeed_lowp import runtime
from mindspeed_lowp.emulator import (
    activations,
    attention,
    casts,
    dtypes,
    grouped_matmul,
    moe,
    norms,
    npu,
    optimizer,
    profiler,
    quantization,
    rotary,
    tensors,
    torchair,
    transfer,
)
from mindspeed_lowp.emulator.missing import refusing

_OPERATORS = (
    activations, attention, casts, grouped_matmul, moe, norms, optimizer, quantization, rotary
)  # fmt: skip

_TRANSFER = "torch_npu.contrib.transfer_to_npu"


def install() -> None:
    """Put `torch_npu` and `torchair` into `sys.modules`, on the runtime's device."""
    runtime.install_device()
    device = npu.create()
    npu.install(device)
    tensors.install()
    sys.modules.update(_torch_npu(device))
    sys.modules.update(torchair.create())
    sys.meta_path.append(_TransferOnImport(device))


def operators() -> dict[str, Any]:
    """Every operator there is, by its torch_npu name."""
    return {
        name: value for module in _OPERATORS for name, value in vars(module).items() if name[:4] == "npu_"
    }


def _torch_npu(device: ModuleType) -> dict[str, ModuleType]:
    """The modules by name."""
    modules = {"torch_npu.npu": device, "torch_npu.profiler": profiler}

    def module(name: str, **contents: Any) -> ModuleType:
        new = modules[name] = ModuleType(name)
        new.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(new).update(contents, __path__=[], __getattr__=refusing(name))
        return new

    collect_env = module("torch_npu.utils.collect_env", get_cann_version=lambda: "emulated")
    utils = module("torch_npu.utils", collect_env=collect_env)
    process_group = SimpleNamespace(Options=_ProcessGroupOptions)
    c10d = module("torch_npu._C._distributed_c10d", ProcessGroupHCCL=process_group)
    constants = {name: value for name, value in vars(dtypes).items() if isinstance(value, (int, list))}
    module(
        "torch_npu",
        __doc__="mindspeed_lowp's emulator of torch_npu.",
        __file__=__file__,
        __version__=f"{torch.__version__.split('+')[0]}+emulated",
        npu=device,
        profiler=profiler,
        utils=utils,
        contrib=module("torch_npu.contrib"),
        _C=module("torch_npu._C", _distributed_c10d=c10d),
        **constants,
        **operators(),
    )
    return modules


class _ProcessGroupOptions:
    """Options of a communicator, which the runtime's process groups take none of."""

    def __init__(self) -> None:
        self.hccl_config: dict[str, Any] = {}


class _TransferOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs `transfer` when, and only when, the module is imported."""

    def __init__(self, device: ModuleType) -> None:
        self.device = device

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == _TRANSFER else None

    def exec_module(self, module: ModuleType) -> None:
        transfer.transfer(self.device)
