"""What the emulated NPU calls itself."""

from __future__ import annotations

_name = "Ascend950PR_9599"


def device_name(device: object = None) -> str:
    """`torch_npu.npu.get_device_name`; there is one device only."""
    return _name


def set_device_name(name: str) -> None:
    """Change it; code that has asked before may have remembered the answer."""
    global _name
    _name = name
