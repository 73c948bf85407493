"""Transformer Engine's `_extra_state`: in its checkpoints for every module, and of no use to anybody else."""

from __future__ import annotations

from typing import Any

from torch import nn


def ignore_extra_state(module: nn.Module) -> None:
    """Let `load_state_dict` pass over the extra state of a module that has none itself."""

    def drop(state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)

    module._register_load_state_dict_pre_hook(drop)
