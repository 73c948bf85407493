"""Load a model with experts into modules of the other `--transformer-impl`.

In checkpoints of Megatron the layer norm in front of experts has a name in either implementation: local
modules call it as if it were fused with a linear, which it never is there, Transformer Engine's by its own.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features.base import Feature

_LOCAL, _TRANSFORMER_ENGINE = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."


class ExpertNormNamesFeature(Feature):
    """Always on: there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__("expert-norm-names", optimization_level=0)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.core.dist_checkpointing.load", load_wrapper)


def load_wrapper(load: Callable[..., Any]) -> Callable[..., Any]:
    """Ask the checkpoint for the names that it has, in the model and in the optimizer's state."""

    @functools.wraps(load)
    def wrapper(sharded_state_dict: dict, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        norms = [
            tensor
            for tensor in nested_values(sharded_state_dict)
            if isinstance(tensor, ShardedTensor)
            and (_LOCAL in tensor.key or _TRANSFORMER_ENGINE in tensor.key)
        ]
        if norms:
            saved = load_tensors_metadata(checkpoint_dir).keys()
            for norm in norms:
                other = _other_name(norm.key)
                if norm.key not in saved and other in saved:
                    norm.key = other
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return wrapper


def _other_name(key: str) -> str:
    if _LOCAL in key:
        return key.replace(_LOCAL, _TRANSFORMER_ENGINE)
    return key.replace(_TRANSFORMER_ENGINE, _LOCAL)
