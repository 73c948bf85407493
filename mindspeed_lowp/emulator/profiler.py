"""`torch_npu.profiler`: names that a training loop uses, over PyTorch's own profiler of the CPU."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.profiler import ProfilerAction, schedule, tensorboard_trace_handler

__all__ = [
    "AiCMetrics",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "profile",
    "schedule",
    "tensorboard_trace_handler",
]


class ProfilerActivity(Enum):
    CPU = "cpu"
    NPU = "npu"


ProfilerLevel = Enum("ProfilerLevel", ["Level_none", "Level0", "Level1", "Level2"])
AiCMetrics = Enum(
    "AiCMetrics", ["AiCoreNone", "PipeUtilization", "ArithmeticUtilization", "Memory", "MemoryL0", "MemoryUB"]
)


class _ExperimentalConfig:
    """What to record of an NPU; there is none."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def profile(
    activities: Any = None, *, experimental_config: _ExperimentalConfig | None = None, **options: Any
) -> torch.profiler.profile:
    """`torch.profiler.profile` of the CPU, whichever activities are asked for."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)
