"""What ops/npu calls, against the torch_npu wheel: read, never imported.

The wheel is looked for where TORCH_NPU_WHEEL points (a wheel file, or a folder that holds the unpacked
`torch_npu`), else downloaded once into pytest's cache. Its schemas are parsed by torch and its meta functions
run under a stand-in for the `torch_npu` module, so that every call is checked as FakeTensor on an NPU machine
would check it.
"""

import ast
import inspect
import math
import os
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.ops import npu
from mindspeed_lowp.ops.npu import casts, matmul, mx, scaled
from tests.ops.test_registration import operands

VERSION = "2.13.0"
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
METAS = "torch_npu/op_plugin/meta/_meta_registrations.py"
# Operators that serve under a name of their own.
THEIR_NAME = {"cast": "npu_dtype_cast", "decode": "npu_dtype_cast"}
NAMES = [name for name in operands() if name != "quant_dequant_mxfp4"]  # that one is the FakeQuant toolkit's


def read_wheel(cache: pytest.Cache) -> Callable[[str], str]:
    """A function from a path in the wheel to its text; skips the test where there is no wheel to be had."""
    given = os.environ.get("TORCH_NPU_WHEEL")
    if given and Path(given).is_dir():
        return lambda path: (Path(given) / path).read_text()
    folder = cache.mkdir("torch_npu")
    if not given and not list(folder.glob("*.whl")):
        download = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, f"torch_npu=={VERSION}"],
            capture_output=True,
            text=True,
        )
        if download.returncode != 0:
            pytest.skip(f"torch_npu=={VERSION} could not be downloaded: {download.stderr.strip()[-200:]}")
    wheel = zipfile.ZipFile(given or next(folder.glob("*.whl")))
    return lambda path: wheel.read(path).decode()


def definitions(source: str) -> dict[str, ast.stmt]:
    """Module-level functions (without decorators), by name and by operator implemented, and constants."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            operators = re.findall(r"'(npu_\w+)'", " ".join(map(ast.unparse, node.decorator_list)))
            node.decorator_list = []
            found |= dict.fromkeys([node.name, *operators], node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Constant):
            found[node.targets[0].id] = node
    return found


def meta_functions(source: str, operators: list[str]) -> dict[str, Callable]:
    """The meta functions of these operators, with all they use, in a scope with a stand-in torch_npu."""
    found = definitions(source)
    wanted: dict[int, ast.stmt] = {}
    todo = list(operators)
    while todo:
        node = found.get(todo.pop())
        if node is not None and id(node) not in wanted:
            wanted[id(node)] = node
            todo += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    codes = {"hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292, "float8_e8m0fnu": 293}
    codes |= {"float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297, "int4": 285}
    scope = {
        "torch": torch,
        "math": math,
        "torch_npu": types.SimpleNamespace(**codes),
        "ops_error": lambda code: "",
        "ErrCode": types.SimpleNamespace(PARAM=0, VALUE=0, TYPE=0, NOT_SUPPORT=0),
    }
    body = sorted(wanted.values(), key=lambda node: node.lineno)
    exec(compile(ast.Module(body, type_ignores=[]), METAS, "exec"), scope)
    return {operator: scope[found[operator].name] for operator in operators}


@pytest.fixture(scope="module")
def torch_npu(request) -> Iterator[types.SimpleNamespace]:
    """torch_npu as far as ops/npu calls it: its schemas on its meta functions, under a name of their own."""
    read = read_wheel(request.config.cache)
    schemas = dict(re.findall(r"func: (npu_\w+)(\(.*)", read(SCHEMAS)))
    ours = [*dict.fromkeys(THEIR_NAME.values()), *(f"npu_{name}" for name in ops.__all__)]
    operators = [operator for operator in ours if operator in schemas]
    metas = meta_functions(read(METAS), operators)
    library = torch.library.Library("npu_wheel", "DEF")
    for operator in operators:
        library.define(operator + schemas[operator].rstrip())
        library.impl(operator, metas[operator], "CompositeExplicitAutograd")
    yield types.SimpleNamespace(
        **{operator: getattr(torch.ops.npu_wheel, operator) for operator in operators}
    )
    library._destroy()


def npu_call(name: str) -> Callable:
    return next(getattr(family, name) for family in (casts, mx, scaled, matmul) if hasattr(family, name))


@pytest.mark.parametrize("name", NAMES)
def test_the_wheel_accepts_our_call_and_returns_our_shapes_and_dtypes(name, torch_npu, monkeypatch):
    monkeypatch.setattr(npu, "torch_npu", lambda: torch_npu)
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in operands()[name]]
    theirs = npu_call(name)(*arguments)
    ours = getattr(torch.ops.lowp, name)(*arguments)
    for t, o in zip(*(v if isinstance(v, tuple) else (v,) for v in (theirs, ours)), strict=True):
        if o is not None:
            assert (t.shape, t.dtype) == (o.shape, o.dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("anti_mx_quant", *THEIR_NAME)])
def test_public_parameters_have_torch_npus_names_and_order(name, torch_npu):
    """Ours may lack parameters that only other formats need, never add or reorder any."""
    theirs = [argument.name for argument in getattr(torch_npu, f"npu_{name}").default._schema.arguments]
    ours = list(inspect.signature(getattr(ops, name)).parameters)
    ours = ["input" if n == "x" and "input" in theirs else n for n in ours]
    assert ours == [n for n in theirs if n in ours]
