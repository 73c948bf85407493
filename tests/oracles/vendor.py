"""The vendor's golden functions and case lists, from a checkout of hicann/ops-nn that OPS_NN_PATH names."""

import csv
import importlib.util
import math
import os
from ast import literal_eval
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, FormatInfo
from tests.ops.data import assert_same_bytes

CHECKOUT = Path(os.environ.get("OPS_NN_PATH", "/nonexistent"))
needs_checkout = pytest.mark.skipif(
    "OPS_NN_PATH" not in os.environ, reason="OPS_NN_PATH does not name a checkout of hicann/ops-nn"
)

#: The vendor's codes of element formats.
VENDOR_FORMAT = {E5M2: 35, E4M3: 36, E2M1: 40, E1M2: 41}
INPUT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Elements; larger cases are cut along their first axes, for the goldens take seconds per million.
LARGEST = 1 << 18


def golden(path: str, name: str):
    spec = importlib.util.spec_from_file_location(f"golden_{name}", CHECKOUT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return np.errstate(all="ignore")(getattr(module, name))


def quantizer(name: str):
    return golden(f"quant/{name}/tests/assets/golden.py", f"{name}_golden")


def vendor_cases(name: str) -> list:
    """The cases of the operator's lists: shapes, dtype, attributes, range of values of the first input."""
    cases = {}
    for path in sorted((CHECKOUT / f"quant/{name}/tests/st/arch35").glob("*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                ranges = eval(row["input_data_ranges"], {"inf": math.inf, "nan": math.nan})
                shapes = literal_eval(row["input_ori_shapes"])
                dtype = INPUT[literal_eval(row["input_dtypes"])[0]]
                attributes = literal_eval(row["attributes"])
                cases[row["testcase_name"]] = (shapes, dtype, attributes, ranges[0])
    return [pytest.param(*case, id=case_name) for case_name, case in cases.items()]


def our_format(code: int) -> FormatInfo:
    return next(info for info, vendor in VENDOR_FORMAT.items() if vendor == code)


def sample(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Uniform numbers of a vendor case; an infinite range means that Inf and NaN are mixed in."""
    shape = list(shape)
    for axis in range(len(shape)):
        least = 64 if axis >= len(shape) - 2 else 2
        while math.prod(shape) > LARGEST and shape[axis] > least:
            half = shape[axis] // 2
            shape[axis] = max(least, half + (half + shape[axis]) % 2)  # as odd or even as before
    generator = torch.Generator().manual_seed(0)
    if math.isfinite(low) and math.isfinite(high):
        x = torch.rand(shape, generator=generator, dtype=torch.double)
        return (low + x * high - x * low).to(dtype)
    x = torch.randn(shape, generator=generator)
    chosen = torch.rand(shape, generator=generator)
    x[chosen < 0.01] = low
    x[chosen > 0.99] = high
    return x.to(dtype)


def as_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def as_bytes(codes: np.ndarray) -> Tensor:
    """The golden's codes as bytes; its FP4 codes, one a byte, packed two a byte."""
    name = codes.dtype.name
    codes = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8))
    if name.startswith("float4"):
        codes = codes[..., ::2] & 0xF | (codes[..., 1::2] & 0xF) << 4
    return codes


def same(actual: Tensor, expected: np.ndarray) -> None:
    assert_same_bytes(actual.view(torch.uint8), as_bytes(expected))
