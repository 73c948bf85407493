"""`python recorded_pretraining.py RECORD FLAGS...`: scripts/pretrain_gpt.py, writing down what it computes.

Writes a dictionary to RECORD.<rank>:

    losses     of each step
    first      the parameters before the first step
    last       the parameters after the last step
    sharded    the names of those that tensor parallelism splits
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    # Not above: processes that Megatron spawns to write checkpoints import this module, and need none of it.
    import mindspeed_lowp.adaptor  # noqa: F401, I001 - patches Megatron, so it comes first
    import torch
    from megatron.training import training

    record_path = sys.argv.pop(1)
    record: dict[str, Any] = {"losses": []}
    train_step = training.train_step

    def parameters(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model[0].named_parameters()}

    def recorded(forward: Any, data: Any, model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        if "first" not in record:
            record["first"] = parameters(model)
            named = model[0].named_parameters()
            record["sharded"] = {n for n, p in named if getattr(p, "tensor_model_parallel", False)}
        result = train_step(forward, data, model, *args, **kwargs)
        record["losses"].append(float(result[0]["lm loss"]))
        record["last"] = parameters(model)
        return result

    training.train_step = recorded
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.save(record, f"{record_path}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main()
