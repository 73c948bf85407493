"""The parameters of the emulator's own operators, against the schemas in the torch_npu wheel.

Those that it takes from mindspeed_lowp.ops are compared in test_torch_npu_wheel.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from mindspeed_lowp.emulator import quantization
from mindspeed_lowp.emulator.library import operators
from tests.oracles.test_torch_npu_wheel import SCHEMAS, read_wheel

OPERATORS = {name: operator for name, operator in operators().items() if name not in vars(quantization)}

# Of several overloads, the one that is emulated.
OVERLOADS = {"npu_apply_adam_w": "npu_apply_adam_w.out", "npu_format_cast_": "npu_format_cast_.acl_format"}


@pytest.fixture(scope="module")
def schemas(request) -> dict[str, str]:
    text = read_wheel(request.config.cache)(SCHEMAS)
    lines = re.findall(r"func: (npu_\w+(?:\.\w+)?)(\(.*)", text)
    return {name: name + rest for name, rest in reversed(lines)}


@pytest.mark.parametrize("name", OPERATORS)
def test_parameters_and_defaults(name, schemas):
    schema = torch._C.parse_schema(schemas[OVERLOADS.get(name, name)])
    theirs = {argument.name: argument for argument in schema.arguments if not argument.is_out}
    signature = inspect.signature(OPERATORS[name]).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    # In Python, the arguments that results are written to are one tuple `out`.
    ours = {n: p for n, p in signature.items() if p.kind is not p.VAR_KEYWORD and n != "out"}
    assert list(ours) == [n for n in theirs if n in ours]
    assert takes_more or len(ours) == len(theirs)
    for argument, parameter in ours.items():
        their = theirs[argument]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == their.kwarg_only
        default = their.default_value if their.has_default_value() else parameter.empty
        assert parameter.default == default
