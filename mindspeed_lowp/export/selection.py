"""Which parameters are quantized."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

import torch

from mindspeed_lowp.export.checkpoint import ExportError, Parameter
from mindspeed_lowp.export.packing import check_shape

#: Parts of a layer's name that always keep it in high precision: embeddings, the output layer, routers.
ALWAYS_KEPT = ("embed", "wte", "wpe", "lm_head", "output_layer", "router")
# The routers of Hugging Face's models are called as the last of these; `gate_proj` is none.
_GATE = re.compile(r"(^|\.)(gate|shared_expert_gate)$")
# Grouped experts in one tensor, [E, N, K] or [E, K, N].
_EXPERTS = re.compile(r"(^|\.)experts\.")


def quantized_names(
    parameters: Sequence[Parameter], skip_names: Iterable[str] = (), experts_only: bool = False
) -> set[str]:
    """The names of the weights to quantize: the matrices called ``weight``, but for the layers kept.

    Args:
        parameters: all of the checkpoint.
        skip_names: keep each layer whose dotted name contains one of these; case matters.
        experts_only: keep all but grouped experts.

    Raises:
        ExportError: a name matches no layer, a weight's shape does not fit the format, or none is left.
    """
    skip_names = tuple(skip_names)
    _check_skip_names(skip_names, parameters)
    chosen, misfits = set(), []
    for parameter in parameters:
        if _is_kept(parameter, skip_names) or (experts_only and not _EXPERTS.search(parameter.module + ".")):
            continue
        if (parameter.name.endswith(".weight") and len(parameter.shape) == 2) or _is_stack(parameter):
            try:
                check_shape(parameter.shape)
                _check_dtype(parameter.dtype)
            except ValueError as error:
                misfits.append(f"{parameter.name} {error}")
            chosen.add(parameter.name)
    if misfits:
        more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise ExportError(
            f"{'; '.join(misfits[:3])}{more}. Add --skip-names with a part of a name to keep it as it is"
        )
    if not chosen:
        raise ExportError(
            "--load: no weight of this checkpoint would be quantized: all are kept or none is a linear's"
        )
    return chosen


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"is {dtype}; weights in bf16, fp16 or fp32 can be exported")


def _is_stack(parameter: Parameter) -> bool:
    return len(parameter.shape) > 2 and _EXPERTS.search(parameter.name) is not None


def _is_kept(parameter: Parameter, skip_names: tuple[str, ...]) -> bool:
    module = parameter.module
    names = (module, parameter.layer) if not _is_stack(parameter) else (parameter.name,)
    if any(part in name for name in names for part in (*ALWAYS_KEPT, *skip_names)):
        return True
    return _GATE.search(module) is not None


def _check_skip_names(skip_names: Sequence[str], parameters: Sequence[Parameter]) -> None:
    names = {name for p in parameters for name in (p.name if _is_stack(p) else p.module, p.layer) if name}
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    for missing in skip_names:
        if not any(missing in name for name in names):
            near = difflib.get_close_matches(missing, parts, n=3, cutoff=0.4) or parts
            raise ExportError(
                f"--skip-names: {missing!r} is in no layer's name; the nearest: {', '.join(near)}"
            )
