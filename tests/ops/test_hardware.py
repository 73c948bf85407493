import functools

import pytest
import torch

from mindspeed_lowp.ops import _library, hardware
from mindspeed_lowp.ops.hardware import is_ascend950_or_newer


@pytest.mark.parametrize(
    ("name", "has_mx"),
    [
        ("Ascend910B3", False),
        ("Ascend910_9392", False),
        ("Ascend310P3", False),
        ("Ascend910_9589", True),
        ("Ascend950PR_9589", True),
        ("Ascend960", True),
    ],
)
def test_ascend_generations(name, has_mx):
    assert is_ascend950_or_newer(name) is has_mx


@pytest.mark.parametrize(("name", "used"), [("Ascend950PR_9589", "torch_npu"), ("Ascend910B3", "reference")])
def test_an_older_npu_emulates(monkeypatch, name, used):
    npu = type("npu", (), {"is_available": lambda: True, "get_device_name": lambda: name})
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(hardware, "npu_has_mx", functools.lru_cache(hardware.npu_has_mx.__wrapped__))
    kernel = _library.by_npu_generation(lambda x: ("torch_npu", x), lambda x: ("reference", x))
    assert kernel(3) == (used, 3)
