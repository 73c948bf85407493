"""Hosts own the command line and the patches: MindSpeed's features manager, or ours of the same contract."""

from __future__ import annotations

import importlib.util

from mindspeed_lowp import runtime


def register() -> None:
    """Hand the features to MindSpeed where it is installed, otherwise to bare Megatron.

    Bare Megatron is also let run where there is neither CUDA nor an NPU; MindSpeed runs there on the emulator
    of torch_npu.
    """
    if importlib.util.find_spec("mindspeed") is not None:
        from mindspeed_lowp.hosts import mindspeed as host
    else:
        from mindspeed_lowp.hosts import bare_megatron as host

        runtime.install()
    host.register()
