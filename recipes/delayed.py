"""Delayed scaling: one scale a tensor, from the largest magnitudes of past steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_lowp.recipes.base import NOT_DIVIDED, Divided, Operand, Recipe, Role
from mindspeed_lowp.recipes.per_tensor import PerTensorRecipe, amax_of, largest_of_all, quantize_by

ROLES: tuple[Role, ...] = ("input", "weight", "grad")
AMAX_COMPUTE_ALGOS = ("most_recent", "max")


class AmaxHistory:
    """The largest magnitudes that a layer's input, weight and gradient had in past steps, and in this one.

    past: [length, 3], fp32, the latest first; 0 where there was no step yet.
    current: [3], since the last `advance`.
    known: for each, whether the past says anything; a question that no device has to be waited for.
    """

    def __init__(self, length: int) -> None:
        self.past = torch.zeros(length, len(ROLES))
        self.current = torch.zeros(len(ROLES))
        self.known = [False] * len(ROLES)

    def restore(self, past: Tensor) -> None:
        """Take over a saved `past`, of any length: the latest entries count."""
        kept = past[: len(self.past)].to(self.past)
        self.past = torch.cat((kept, torch.zeros_like(self.past)))[: len(self.past)]
        self.known = [latest > 0 for latest in self.past[0].tolist()]

    def to(self, device: torch.device) -> None:
        if self.past.device != device:
            self.past, self.current = self.past.to(device), self.current.to(device)


@dataclass(frozen=True)
class DelayedRecipe(PerTensorRecipe):
    """Quantizes by what is known when a tensor arrives; its own magnitude counts from the next step on.

    A tensor that outgrows its past saturates. In the first step, and as long as a tensor was 0 in all steps,
    its current magnitude is taken: of a divided tensor that of all parts, as the past is by `advance`. NaN or
    Inf make the scale NaN and with it every product, so that they are seen; they do not enter the history.
    Experts of a layer share one history.

    `advance` ends a step: call it after the optimizer's. Each layer needs a recipe of its own (`for_layer`).

    fp8_format: "e4m3", or "hybrid" for E5M2 gradients.
    amax_history_len: steps that are remembered.
    amax_compute_algo: "most_recent" of them, or their "max".
    margin: the scale is larger by 2 ** margin, which is an fp32 number.
    """

    name: ClassVar[str] = "delayed"
    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    amax_history_len: int = 1
    amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    margin: int = 0
    history: AmaxHistory = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len!r}: expected a whole number from 1 on")
        if self.amax_compute_algo not in AMAX_COMPUTE_ALGOS:
            expected = ", ".join(AMAX_COMPUTE_ALGOS)
            raise ValueError(f"amax_compute_algo={self.amax_compute_algo!r}: expected one of {expected}")
        if not isinstance(self.margin, int) or not -126 <= self.margin <= 127:
            raise ValueError(f"margin={self.margin!r}: expected a whole number from -126 to 127")
        object.__setattr__(self, "history", AmaxHistory(self.amax_history_len))

    def for_layer(self, divided: Divided = NOT_DIVIDED) -> Recipe:
        return PerTensorRecipe.for_layer(replace(self), divided)

    def quantize_matrix(self, x: Tensor, role: Role) -> Operand:
        history, column = self.history, ROLES.index(role)
        history.to(x.device)
        now = amax_of(x)
        history.current[column] = torch.maximum(history.current[column], now)
        if history.known[column]:
            past = history.past[:, column]
            amax = past.max() if self.amax_compute_algo == "max" else past[0]
        else:
            amax = self.amax_of_whole(x, role)
        amax = amax * 2.0**self.margin + (now - now)  # NaN where now is not finite
        return quantize_by(amax, x, self.element(role))


def advance(recipes: Sequence[DelayedRecipe], group: dist.ProcessGroup | None = None) -> None:
    """End a step: what was seen in it becomes the latest entry of each history.

    With `group`, the largest over its ranks; all of them have the same layers in the same order.
    """
    if not recipes:
        return
    latest = torch.stack([recipe.history.current for recipe in recipes])  # [layers, 3]
    if group is not None and group.size() > 1:
        latest = largest_of_all(latest, group)
    for recipe, seen in zip(recipes, latest, strict=True):
        history = recipe.history
        usable = seen.isfinite() & (seen > 0)  # 0: not used in this step
        history.past = torch.cat((torch.where(usable, seen, history.past[0])[None], history.past[:-1]))
        history.known = [before or now for before, now in zip(history.known, usable.tolist(), strict=True)]
        history.current.zero_()
