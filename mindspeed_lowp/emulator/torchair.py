"""The names of `torchair`, the graph compiler, that code registers converters with when it is imported.

Nothing is ever converted: PyTorch runs eagerly here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_lowp.emulator.missing import refusing


def create() -> dict[str, ModuleType]:
    """The modules by name."""
    torchair = _module("torchair", register_fx_node_ge_converter=_register)
    ge = torchair.ge = _module("torchair.ge")
    for name in ("Tensor", "TensorSpec", "DataType"):  # in annotations of converters
        setattr(ge, name, type(name, (), {}))
    return {module.__name__: module for module in (torchair, ge)}


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents, __path__=[], __getattr__=refusing(name))
    return module


def _register(operator: Any) -> Callable[[Callable], Callable]:
    return lambda converter: converter
