"""The names in MindSpeed that this package replaces, subclasses or calls.

All of them are here, with the parameters they are expected to have, and are looked at when a run starts: code
of another version, shaped otherwise, stops it instead of training something else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

#: What the package was tested with.
TESTED = "MindSpeed master of 2026-07-21 (028de58c), with Megatron-LM core_v0.12.1"


@dataclass(frozen=True)
class PatchPoint:
    """A name in MindSpeed.

    use: what is done with it, for the documentation.
    parameters: what it is called with; None where it is not a function.
    """

    module: str
    name: str
    use: str
    parameters: tuple[str, ...] | None = None

    def problem(self) -> str | None:
        """What is not as expected; None where all is."""
        path = f"{self.module}.{self.name}"
        try:
            value = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not self.module.startswith(error.name):  # something that it imports
                raise
            return f"there is no module {self.module}"
        for part in self.name.split("."):
            if not hasattr(value, part):
                return f"{self.module} has no {self.name}"
            value = getattr(value, part)
        if self.parameters is None:
            return None
        found = tuple(
            name for name in inspect.signature(value).parameters if name not in ("self", "ctx", "cls")
        )
        if found[: len(self.parameters)] != self.parameters:
            return f"{path} takes ({', '.join(found)}), not ({', '.join(self.parameters)})"
        return None


_TE = "mindspeed.te.pytorch"
_MOE = "mindspeed.core.transformer.moe"
_FUNCTION = ("input_", "weight", "bias", "fp8_meta")
_WRAPPED = "wrapped: layers with a recipe of ours multiply by it, others as before"
_SUBCLASSED = "subclassed: layers of this class become ours when the model is built"

LINEARS = (
    PatchPoint(f"{_TE}.module.linear", "ColumnParallelNoSeq.forward", _WRAPPED, _FUNCTION),
    PatchPoint(f"{_TE}.module.linear", "ColumnParallelSeq.forward", _WRAPPED, _FUNCTION),
    PatchPoint(f"{_TE}.module.linear", "RowParallelNoSeq.forward", _WRAPPED, _FUNCTION),
    PatchPoint(f"{_TE}.module.linear", "RowParallelSeq.forward", _WRAPPED, _FUNCTION),
    PatchPoint(f"{_TE}.module.linear", "TEColumnParallelLinear.forward", _SUBCLASSED, ("input_", "weight")),
    PatchPoint(f"{_TE}.module.linear", "TERowParallelLinear.forward", _SUBCLASSED, ("input_",)),
    PatchPoint(
        f"{_TE}.module.layernorm_column_parallel_linear",
        "MindSpeedTELayerNormColumnParallelLinear.forward",
        _SUBCLASSED,
        ("inp",),
    ),
    PatchPoint(f"{_TE}.fp8.metadata", "FP8Metadata.is_fp8_enable", "overridden: says no without a recipe"),
    PatchPoint(f"{_TE}.fp8.metadata", "FP8Metadata.fp8_enable", "overridden: says no without a recipe"),
    PatchPoint(
        f"{_TE}.fp8.state_manager",
        "FP8GlobalStateManager.is_fp8_enabled",
        "called: whether the block that is running trains in FP8",
        (),
    ),
)
EXPERTS = (
    PatchPoint(
        f"{_TE}.module.grouped_linear",
        "MindSpeedTEColumnParallelGroupedLinear.forward",
        _SUBCLASSED,
        ("x", "m_splits"),
    ),
    PatchPoint(
        f"{_TE}.module.grouped_linear",
        "MindSpeedTERowParallelGroupedLinear.forward",
        _SUBCLASSED,
        ("x", "m_splits"),
    ),
    PatchPoint(
        f"{_TE}.module.grouped_linear",
        "MindSpeedTEGroupedLinearGMM.forward",
        "called: experts that are kept in high precision",
        ("input_tensor", "m_split", "group_list_type", "ori_weight"),
    ),
    PatchPoint(
        f"{_TE}.module.performance_grouped_linear",
        "MindSpeedTEPerformanceColumnParallelGroupedLinear.forward",
        _SUBCLASSED,
        ("x", "m_splits"),
    ),
    PatchPoint(
        f"{_TE}.module.performance_grouped_linear",
        "MindSpeedTEPerformanceRowParallelGroupedLinear.forward",
        _SUBCLASSED,
        ("x", "m_splits"),
    ),
    PatchPoint(f"{_MOE}.moe_feature.adaptor", "MindSpeedGmmExperts.forward", _SUBCLASSED),
    PatchPoint(f"{_MOE}.grouped_matmul_util", "get_gmm_quant_func", _WRAPPED, ()),
    PatchPoint(
        f"{_MOE}.grouped_matmul_util",
        "BF16GMMFunction.gmm_apply",
        "called: experts that are kept in high precision",
        ("x", "weight", "bias", "tokens_per_expert", "weight_param"),
    ),
)


def problems(has_experts: bool) -> Iterator[str]:
    """What in the installed MindSpeed is not as expected. Imports it."""
    for point in LINEARS + (EXPERTS if has_experts else ()):
        problem = point.problem()
        if problem:
            yield problem
