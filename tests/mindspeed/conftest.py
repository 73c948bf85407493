"""The real MindSpeed and Megatron-LM's own pretrain_gpt.py, on the emulator of torch_npu.

They run where MINDSPEED_PATH and MEGATRON_LM_PATH point at checkouts: Ascend/MindSpeed, and
NVIDIA/Megatron-LM at core_v0.12.1. What MindSpeed imports has to be installed too (scipy, pandas), and
pybind11 with a compiler, for Megatron's datasets.
"""

from __future__ import annotations

import os

import pytest

PATHS = ("MINDSPEED_PATH", "MEGATRON_LM_PATH")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PATHS if not os.environ.get(name)]
    if missing:
        why = f"{' and '.join(missing)} not set: checkouts of MindSpeed and of Megatron-LM core_v0.12.1"
        for item in items:
            if "tests/mindspeed/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=why))
