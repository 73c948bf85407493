"""One run of Megatron-LM's pretrain_gpt.py under MindSpeed.

    python -m tests.mindspeed.trainer HOW RECORD FLAGS

HOW: `alone`, without any of this package's features; `ours`, with the adaptor; `late`, with the adaptor after
MindSpeed's. RECORD: where to leave losses, parameters and bytes kept.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from mindspeed_lowp import emulator


def main() -> None:
    how, record_path, *flags = sys.argv[1:]
    megatron = os.environ["MEGATRON_LM_PATH"]
    sys.path[:0] = [os.environ["MINDSPEED_PATH"], megatron]
    script = os.path.join(megatron, "pretrain_gpt.py")
    sys.argv[:] = [script, *flags]
    emulator.install()
    if how in ("alone", "late"):
        import mindspeed.megatron_adaptor  # noqa: F401
    if how in ("ours", "late"):
        import mindspeed_lowp.adaptor  # noqa: F401

    import torch

    torch.set_num_threads(1)
    record = _record()
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        torch.save(record, record_path)


def _record() -> dict[str, Any]:
    """Filled while the run goes on: losses, the parameters after it, bytes kept for one backward pass."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from mindspeed_lowp.memory import saved_bytes

    record: dict[str, Any] = {"losses": [], "saved_bytes": None, "parameters": {}}
    train_step, backward_step = training.train_step, schedules.backward_step
    parameters: list[Any] = []

    def recorded_step(forward: Any, data: Any, model: list, *args: Any, **kwargs: Any) -> Any:
        parameters[:] = [p for chunk in model for p in chunk.parameters()]
        result = train_step(forward, data, model, *args, **kwargs)
        record["losses"].append(float(result[0]["lm loss"]))
        record["parameters"] = {name: p.detach().clone() for name, p in model[0].named_parameters()}
        return result

    def recorded_backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if record["saved_bytes"] is None:
            output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            record["saved_bytes"] = saved_bytes(output, parameters)
        return backward_step(input_tensor, output_tensor, *args, **kwargs)

    training.train_step, schedules.backward_step = recorded_step, recorded_backward
    return record


if __name__ == "__main__":
    main()
