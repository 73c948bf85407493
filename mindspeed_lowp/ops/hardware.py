"""Which NPUs compute MXFP8 themselves."""

import re
from functools import cache

import torch


def npu_name() -> str | None:
    """The name of the Ascend NPU, such as `Ascend910B3`; None where there is none."""
    npu = getattr(torch, "npu", None)
    return npu.get_device_name() if npu is not None and npu.is_available() else None


@cache
def npu_has_mx() -> bool:
    """Whether this machine's NPU is an Ascend 950 or newer."""
    name = npu_name()
    return name is not None and is_ascend950_or_newer(name)


def is_ascend950_or_newer(name: str) -> bool:
    """Whether an NPU of that name has MX hardware. The first 950s call themselves `Ascend910_95...`."""
    if name.startswith("Ascend910_95"):
        return True
    generation = re.match(r"Ascend(\d+)", name)
    return generation is not None and int(generation[1]) >= 950
