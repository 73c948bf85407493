"""The CUDA generator and the host generator, as two states.

Megatron draws weights and dropout masks from the CUDA generator, which its model-parallel tracker
switches between states, and leaves PyTorch's host generator to the data side, where it may differ
between tensor-parallel ranks (only rank 0 of each group builds data loaders). Mixing the two gives those
ranks different replicated parameters.

All tensors here are CPU tensors, whose kernels draw from the one generator that lives in PyTorch's C++
core. So that one plays the CUDA generator, and a new generator stands behind `torch.get_rng_state` and
`torch.manual_seed`. Data loaders draw their workers' seeds from generators of their own: they start in every
run, resumed or not, and a resumed one would save another host state than an uninterrupted one. Saving,
restoring and forking then need no patch:
Megatron's tracker, its checkpoints and its activation recomputation reach the core generator through
`torch.cuda.default_generators`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.data


def install() -> None:
    """Make the core generator the CUDA device's, and give the host one of its own."""
    device_generator = torch.default_generator
    host_generator = torch.Generator()
    host_generator.set_state(device_generator.get_state())

    torch.cuda.default_generators = (device_generator,)
    torch.default_generator = host_generator
    torch.random.default_generator = host_generator

    loader = torch.utils.data.DataLoader
    loader.__init__ = _seeded_apart(loader.__init__, host_generator)
    torch.utils.checkpoint.DefaultDeviceType.set_device_type("cuda")
    torch.utils.checkpoint.get_device_states = _device_states


def _seeded_apart(init: Callable[..., None], host: torch.Generator) -> Callable[..., None]:
    """A DataLoader draws from the core generator when iterated: for shuffling, and seeds for its workers."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            shuffles = kwargs.get("shuffle", False)
            kwargs["generator"] = host if shuffles else torch.Generator().manual_seed(host.initial_seed())
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False  # torch warns that there is no accelerator to pin memory for
        init(self, *args, **kwargs)

    return wrapper


def _device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """For `torch.utils.checkpoint`, which would ask the tensors for their devices and save no CUDA state."""
    return [0], [torch.cuda.get_rng_state()]
