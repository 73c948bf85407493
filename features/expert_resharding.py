"""Load a checkpoint of another expert-parallel size, where one of the two is 1.

Only experts that are divided have an optimizer of their own. Megatron saves every parameter's state under the
parameter's name, which any size can load, but the optimizers' settings in as many parts as there are
optimizers, and refuses another number of them.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import stop


class ExpertReshardingFeature(Feature):
    """Always on: there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__("expert-resharding", optimization_level=0)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed_lowp.megatron_versions import SAVES_OPTIMIZER_STATE_BY_PARAMETER

        if SAVES_OPTIMIZER_STATE_BY_PARAMETER:
            name = "megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict"
            patch_manager.register_patch(name, load_state_dict_wrapper)


def load_state_dict_wrapper(load: Callable[..., None]) -> Callable[..., None]:
    """Give each optimizer its settings, in however many parts they were saved."""

    @functools.wraps(load)
    def wrapper(self: Any, state_dict: Any) -> None:
        if isinstance(state_dict, dict):
            state_dict = redistributed(state_dict, self.chained_optimizers)
        load(self, state_dict)

    return wrapper


def redistributed(state_dict: dict, optimizers: list) -> dict:
    """The state of each of `optimizers`, by its number, or that of the only one.

    state_dict: the parameters' states, which the present optimizers asked for, merged with the settings that
        the checkpoint has. Two optimizers that load what one has saved get

            {0: {"optimizer": {"state": ...}}, 1: {"optimizer": {"state": ...}},
             "optimizer": {"param_groups": ...}}

        and one that loads what two have saved the reverse. Where as many load as have saved, there is
        nothing to do.
    """
    numbered = {key: value for key, value in state_dict.items() if isinstance(key, int)}
    single = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    if not numbered or not single:
        return state_dict
    if len(optimizers) == 1:
        saved = list(numbered.values())
        _give_settings(single, saved, optimizers[0])
        return single
    for number, state in numbered.items():
        _give_settings(state, [single], optimizers[number])
    return numbered


def _give_settings(state: dict, saved: list[dict], optimizer: Any) -> None:
    """Fill in all of one optimizer's state that is not by parameter, from the optimizers that were saved."""
    if "optimizer" not in saved[0]:  # in fp32, a state is torch's own and nothing around it
        whole = {"optimizer": state}
        _give_settings(whole, [{"optimizer": part} for part in saved], optimizer)
        return
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    inner = state.setdefault("optimizer", {})
    current = optimizer.optimizer.param_groups
    # What was asked for has of a group its list of parameters, or nothing.
    asked = inner.get("param_groups", [{}] * len(current))
    inner["param_groups"] = [
        {**_settings(groups, group), "is_expert_parallel": group["is_expert_parallel"], **own}
        for group, own in zip(current, asked, strict=True)
    ]
    # The `step` of torch's Adam, the same in all optimizers.
    inner["state"] = {**saved[0]["optimizer"].get("state", {}), **inner.get("state", {})}
    for key, value in saved[0].items():
        state.setdefault(key, value)


def _settings(saved_groups: list[dict], group: dict) -> dict:
    """What was saved of a group, whichever optimizer it was in."""
    same = ("wd_mult", "lr_mult", "is_decoupled_lr")
    for saved in saved_groups:
        if all(saved[key] == group[key] for key in same):
            return saved
    wanted = ", ".join(f"{key}={group[key]}" for key in same)
    stop(
        f"--load: the checkpoint's optimizer has no group of parameters with {wanted}: load it without the "
        "optimizer's state (--no-load-optim)"
    )
