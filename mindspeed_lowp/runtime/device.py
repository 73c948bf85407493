"""One CUDA device whose memory is the host's.

Every process has exactly one such device, number 0, as if CUDA_VISIBLE_DEVICES named one. Tensors "on"
it are CPU tensors, so `torch.device("cuda")` stays an ordinary device object and only the functions that
allocate or move memory are redirected. Work is synchronous: streams order nothing, and an event is a
time stamp. Memory statistics are those of the process.

The NPU that `mindspeed_lowp.emulator` adds is the same device by another name, "npu".
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch._dynamo  # looks its rules up by torch.cuda's original functions, once, when imported
from torch.utils._device import _device_constructors

_LIKE_FACTORIES = (
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)
_NEW_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

_EMULATED = ("cuda", "npu")

# Below compute capability 10 Megatron's `validate_args` asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which
# orders kernels in hardware queues: meaningless here.
_CAPABILITY = (10, 0)


def install() -> None:
    """Redirect what Megatron's GPT path calls of `torch.cuda`, and the factories that take a device."""
    _install_cuda_module()
    _install_factories()
    _install_moves()


def host_device(device: Any) -> Any:
    """What stands for `device`: the CPU for "cuda", "npu:1", `torch.device("cuda")` or an index."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in _EMULATED else device
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] in _EMULATED else device
    if isinstance(device, int):
        return "cpu"
    return device


class Stream:
    """A queue that is always empty, because every operation has finished when its call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.cuda_stream = 0

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    """The time at which `record` was called."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1e3

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True


@functools.cache
def device_functions() -> dict[str, Any]:
    """What `torch.cuda` has of the emulated device, by name; `torch.npu` has the same."""
    default_stream = Stream()
    total_memory = psutil.virtual_memory().total
    properties = SimpleNamespace(
        name="CPU",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=total_memory,
        multi_processor_count=torch.get_num_threads(),
    )
    process = psutil.Process()

    def resident(device: Any = None) -> int:
        return process.memory_info().rss

    def peak_resident(device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "device": no_context,
        "synchronize": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "Stream": Stream,
        "Event": Event,
        "stream": no_context,
        "set_stream": nothing,
        "current_stream": lambda device=None: default_stream,
        "default_stream": lambda device=None: default_stream,
        "memory_allocated": resident,
        "memory_reserved": resident,
        "max_memory_allocated": peak_resident,
        "max_memory_reserved": peak_resident,
        "reset_peak_memory_stats": nothing,
        "mem_get_info": lambda device=None: (psutil.virtual_memory().available, total_memory),
        # With _initialized set, `_lazy_init` returns at once and `_lazy_call` calls at once.
        "_initialized": True,
    }


def _install_cuda_module() -> None:
    for mark in ("mark", "range_push", "range_pop", "range"):
        setattr(torch.cuda.nvtx, mark, lambda *args, **kwargs: contextlib.nullcontext())
    for module in (torch.cuda, torch.cuda.random):  # the latter imports some of these names
        for name, replacement in device_functions().items():
            if hasattr(module, name):
                setattr(module, name, replacement)


def _install_factories() -> None:
    # Remembers the original functions, so that `with torch.device("meta"):` still recognises them.
    constructors = _device_constructors()
    for function in constructors:
        name = function.__name__
        if getattr(torch, name, None) is function:
            setattr(torch, name, _allocating_on_host(function))
    for name in _LIKE_FACTORIES:
        setattr(torch, name, _allocating_on_host(getattr(torch, name)))
    for name in _NEW_FACTORIES:
        setattr(torch.Tensor, name, _allocating_on_host(getattr(torch.Tensor, name)))


def _allocating_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        if kwargs.get("pin_memory"):  # pinned memory is the accelerator's
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


def _install_moves() -> None:
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _moving_to_host(owner.to)
        owner.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.type = _cuda_type(torch.Tensor.type)
    torch.load = _loading_to_host(torch.load)


def _moving_to_host(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return to(self, *args, **kwargs)

    return wrapper


def _cuda_type(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` names CUDA types, by which Megatron's optimizers sort parameters."""

    @functools.wraps(tensor_type)
    def wrapper(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    return wrapper


def _loading_to_host(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def wrapper(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, dict) and not callable(map_location):
            map_location = host_device(map_location)
        return load(f, map_location, *args, **kwargs)

    return wrapper
