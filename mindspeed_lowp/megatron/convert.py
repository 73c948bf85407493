"""Give the layers of a built model their recipe, in place, and say what was done."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from mindspeed_lowp.megatron.grouped_linear import (
    TEColumnParallelGroupedLinear,
    TEGroupedLinear,
    TERowParallelGroupedLinear,
)
from mindspeed_lowp.megatron.linear import LowpColumnParallelLinear, LowpRowParallelLinear
from mindspeed_lowp.recipes import Recipe

# Sensitive to precision, and small beside the rest: kept unless somebody builds them otherwise.
HIGH_PRECISION = ("output_layer", "router")

# By exact class: a subclass of somebody else's has a forward of its own, and stays as it is.
_CONVERTED_CLASS = {
    ColumnParallelLinear: LowpColumnParallelLinear,
    RowParallelLinear: LowpRowParallelLinear,
    TEColumnParallelGroupedLinear: TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear: TERowParallelGroupedLinear,
}
_CONVERTED_CLASS |= {converted: converted for converted in _CONVERTED_CLASS.values()}


class ConversionError(ValueError):
    """No layer could be given the recipe, or a filter name matched none; the same on every rank."""


@dataclass
class Conversion:
    """What happened to the layers of one rank, by their fully qualified names.

    linears, grouped: converted; kept: left in high precision.
    """

    linears: list[str] = field(default_factory=list)
    grouped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def convert_chunks(
    chunks: Sequence[nn.Module], recipe: Recipe, filter_fqns: Sequence[str] = ()
) -> Conversion:
    """Convert every parallel linear and grouped expert linear of this rank's model chunks to `recipe`.

    Layers keep their Parameters, so optimizers, data-parallel wrappers and checkpoints are unaffected, and
    converting twice is converting once. Layers whose fully qualified name contains one of `filter_fqns`, and
    those of `HIGH_PRECISION`, stay as they are.

    All ranks of the default process group must call it together. Returns the report of this rank. Raises
    ConversionError, on every rank alike, when nothing was converted on any of them, or when a filter name
    occurs in no layer's name on any of them.
    """
    report = Conversion()
    for name, module in (layer for chunk in chunks for layer in _linears(chunk)):
        filtered = any(part in name for part in (*HIGH_PRECISION, *filter_fqns))
        if filtered or type(module) not in _CONVERTED_CLASS:
            report.kept.append(name)
        else:
            module.__class__ = _CONVERTED_CLASS[type(module)]
            module.recipe = recipe
            (report.grouped if isinstance(module, TEGroupedLinear) else report.linears).append(name)
    _agree(_of_all_ranks(report), filter_fqns)
    return report


def _agree(reports: Sequence[Conversion], filter_fqns: Sequence[str]) -> None:
    """Raise what has to be raised on every rank."""
    converted = [name for report in reports for name in report.linears + report.grouped]
    names = set(converted).union(*(report.kept for report in reports))
    unmatched = [wanted for wanted in filter_fqns if not any(wanted in name for name in names)]
    if unmatched:
        raise ConversionError(_unmatched_message(unmatched, names))
    if not converted:
        why = "all are kept in high precision" if names else "there is no parallel linear in it"
        raise ConversionError(f"no layer of the model was converted: {why}")


def _linears(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's linears, by their name in the whole model.

    That is without the wrappers' `module.`, and with the layers of every pipeline stage numbered through:
    modules are numbered within their stage, `layer_number` counts from 1 over all.
    """
    numbers = {}
    for name, module in chunk.named_modules():
        block, _, index = name.rpartition(".")
        if isinstance(module, BaseTransformerLayer) and index.isdigit():
            numbers[name] = f"{block}.{module.layer_number - 1}"
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, TEGroupedLinear)):
            for local, whole in numbers.items():
                if name.startswith(local + "."):
                    name = whole + name.removeprefix(local)
                    break
            while name.startswith("module."):
                name = name.removeprefix("module.")
            yield name, module


def _of_all_ranks(report: Conversion) -> list[Conversion]:
    if not dist.is_initialized():
        return [report]
    reports = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return reports


def _unmatched_message(unmatched: Sequence[str], names: set[str]) -> str:
    """Name each filter that matched nothing, beside the layer names nearest to it."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    lines = []
    for wanted in unmatched:
        near = difflib.get_close_matches(wanted, sorted(parts | names), n=3, cutoff=0.4)
        lines.append(f"{wanted!r} is in no layer's name; the nearest: {', '.join(near or sorted(parts))}")
    return "; ".join(lines)
