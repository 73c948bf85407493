"""Argument checks of the public functions: each error names the argument, its value and what is accepted."""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from types import UnionType

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_NPU_CODE, MX_BLOCK, MXFP8_FORMATS

_ELEMENTS = tuple(info.dtype for info in MXFP8_FORMATS)
_E8M0 = (None, torch.float8_e8m0fnu, E8M0_NPU_CODE)
E8M0_BYTES = (torch.uint8, torch.float8_e8m0fnu)  # the dtypes in which E8M0 scales come
_OUTPUTS = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
_OUTPUTS |= {5: torch.float16, 15: torch.bfloat16, 6: torch.float32}  # the same as ScalarType numbers


def choice(argument: str, value: object, accepted: tuple, beside: str = "") -> None:
    """``beside``: what else was given that leaves no other choice."""
    if value not in accepted:
        beside = beside and f" with {beside}"
        raise ValueError(
            f"{argument}={value!r} is not supported{beside}; use {' or '.join(map(repr, accepted))}"
        )


def dtype(argument: str, x: Tensor, accepted: tuple[torch.dtype, ...], beside: str = "") -> None:
    if x.dtype not in accepted:
        beside = beside and f"with {beside} "
        raise ValueError(f"{argument} has dtype {x.dtype}; {beside}use {' or '.join(map(str, accepted))}")


def accumulator(argument: str, x: Tensor) -> None:
    """What is added to in place: fp32, each element in a place of its own."""
    dtype(argument, x, (torch.float32,))
    if x.is_neg() or torch._debug_has_internal_overlap(x) == 1:
        raise ValueError(f"{argument} is an expanded or a negated view; use a tensor with memory of its own")


def shape(argument: str, x: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{argument} has shape {list(x.shape)}, expected {list(expected)} ({why})")


def dims(argument: str, x: Tensor, lowest: int, highest: int) -> None:
    if not lowest <= x.dim() <= highest:
        wanted = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        raise ValueError(f"{argument} has {x.dim()} dimensions; {wanted} are supported")


def elements(argument: str, x: Tensor) -> None:
    dtype(argument, x, _ELEMENTS)


def scales(argument: str, scale: Tensor | None, kind_argument: str, kind: object) -> Tensor:
    """Scale bytes as uint8. ``kind`` is torch_npu's ``*_scale_dtype``; None means E8M0, MX's only kind."""
    choice(kind_argument, kind, _E8M0)
    if scale is None:
        raise ValueError(f"{argument}=None is not supported; MX operands need their E8M0 scales (uint8)")
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    dtype(argument, scale, E8M0_BYTES)
    return scale


def output_dtype(argument: str, value: torch.dtype | int | None) -> torch.dtype:
    result = _OUTPUTS.get(value)
    if result is None:
        raise ValueError(
            f"{argument}={value!r} is not supported; use torch.bfloat16, torch.float16 or torch.float32"
        )
    return result


def group_sizes(value: list[int] | None) -> None:
    if value is not None and list(value) != [1, 1, MX_BLOCK]:
        raise ValueError(
            f"group_sizes={value!r} is not supported; use [1, 1, 32], MX's block, or leave it out"
        )


def group_list(argument: str, value: Tensor | None) -> None:
    if value is None:
        raise ValueError(f"{argument}=None is not supported; give a 1-D tensor of int64 or int32")
    dims(argument, value, 1, 1)
    dtype(argument, value, (torch.int64, torch.int32))


def names_arguments(operator: Callable) -> Callable:
    """Make an error that stems from an argument of the wrong kind name that argument.

    Nothing is looked at unless ``operator`` fails with an error that says nothing of arguments.
    """
    hints, signature = typing.get_type_hints(operator), inspect.signature(operator)

    @functools.wraps(operator)
    def checked(*args, **kwargs):
        try:
            return operator(*args, **kwargs)
        except (AttributeError, TypeError):
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if not _is_a(value, hints[name]):
                    kind = inspect.formatannotation(hints[name]).replace("collections.abc.", "")
                    raise ValueError(f"{name}={value!r} is not supported; expected {kind}") from None
            raise

    return checked


def _is_a(value: object, hint: object) -> bool:
    """Whether the value is of the annotated kind, sequences of which kinds included."""
    if isinstance(hint, UnionType):
        return any(_is_a(value, part) for part in hint.__args__)
    if getattr(hint, "__origin__", None) is Sequence:
        (kind,) = hint.__args__
        return isinstance(value, (list, tuple)) and all(_is_a(item, kind) for item in value)
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint)
