"""Registration: one `torch.library` operator for each function, and which implementation serves which device.

| device                            | implementation                                                    |
|-----------------------------------|-------------------------------------------------------------------|
| Ascend 950 or newer (PrivateUse1) | torch_npu (`npu.py`)                                              |
| CPU                               | C++ (`kernels.py`), or the reference where it was not built        |
| anything else                     | the reference (`reference.py`), on the device                     |

Shapes and dtypes of all results are given once more for FakeTensor and `torch.compile`. Plain
`Library.define` and `impl`, because a `custom_op` costs several times more Python for each call.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mindspeed_lowp.ops import composed, hardware, kernels, layout, npu, reference

_SCHEMAS = (
    "dynamic_mx_quant(Tensor x, int axis, ScalarType dst_type, int scale_alg) -> (Tensor, Tensor)",
    "dynamic_mx_quant_with_dual_axis(Tensor x, ScalarType dst_type, int scale_alg)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "grouped_dynamic_mx_quant(Tensor x, Tensor group_index, ScalarType dst_type, int scale_alg)"
    " -> (Tensor, Tensor)",
    "anti_mx_quant(Tensor x, Tensor mxscale, int axis, ScalarType dst_type) -> Tensor",
    "quant_matmul(Tensor x1, Tensor x2, Tensor scale, Tensor pertoken_scale, Tensor? bias,"
    " ScalarType output_dtype) -> Tensor",
    "grouped_matmul(Tensor x, Tensor weight, Tensor scale, Tensor per_token_scale, Tensor group_list,"
    " int group_type, int group_list_type, ScalarType output_dtype) -> Tensor",
    "add_quant_matmul_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor x1_scale) -> ()",
    "add_quant_gmm_(Tensor(a!) self, Tensor x1, Tensor x2, Tensor x2_scale, Tensor group_list,"
    " Tensor x1_scale, int group_list_type) -> ()",
)

_library = torch.library.Library("lowp", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _kernels(backend) -> dict[str, Callable]:
    """``backend``'s quantizers, and the matmuls composed of its dequantization and a GEMM."""
    quantizers = (
        "dynamic_mx_quant",
        "dynamic_mx_quant_with_dual_axis",
        "grouped_dynamic_mx_quant",
        "anti_mx_quant",
    )
    matmuls = ("quant_matmul", "grouped_matmul", "add_quant_matmul_", "add_quant_gmm_")
    return {name: getattr(backend, name) for name in quantizers} | {
        name: partial(getattr(composed, name), backend.anti_mx_quant) for name in matmuls
    }


def by_npu_generation(native: Callable, emulated: Callable) -> Callable:
    """``native`` on an Ascend 950 or newer, ``emulated`` on an older NPU; asked when an NPU tensor comes."""

    def kernel(*args):
        return (native if hardware.npu_has_mx() else emulated)(*args)

    return kernel


for _name, _emulated in _kernels(reference).items():
    _library.impl(_name, _emulated, "CompositeExplicitAutograd")
    _library.impl(_name, by_npu_generation(getattr(npu, _name), _emulated), "PrivateUse1")
if kernels.available():
    for _name, _kernel in _kernels(kernels).items():
        _library.impl(_name, _kernel, "CPU")


def _fake(name: str):
    return torch.library.register_fake(f"lowp::{name}", lib=_library)


@_fake("dynamic_mx_quant")
def _(x, axis, dst_type, scale_alg):
    y = x.new_empty(x.shape, dtype=dst_type)
    return y, x.new_empty(layout.scale_shape(x.shape, axis), dtype=torch.uint8)


@_fake("dynamic_mx_quant_with_dual_axis")
def _(x, dst_type, scale_alg):
    result = []
    for axis in (x.dim() - 1, x.dim() - 2):
        result.append(x.new_empty(x.shape, dtype=dst_type))
        result.append(x.new_empty(layout.scale_shape(x.shape, axis), dtype=torch.uint8))
    return tuple(result)


@_fake("grouped_dynamic_mx_quant")
def _(x, group_index, dst_type, scale_alg):
    y = x.new_empty(x.shape, dtype=dst_type)
    return y, x.new_empty(layout.grouped_scale_shape(x.shape, group_index.shape[0]), dtype=torch.uint8)


@_fake("anti_mx_quant")
def _(x, mxscale, axis, dst_type):
    return x.new_empty(x.shape, dtype=dst_type)


@_fake("quant_matmul")
def _(x1, x2, scale, pertoken_scale, bias, output_dtype):
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return x1.new_empty((*batch, x1.shape[-2], x2.shape[-1]), dtype=output_dtype)


@_fake("grouped_matmul")
def _(x, weight, scale, per_token_scale, group_list, group_type, group_list_type, output_dtype):
    shape = (x.shape[0], weight.shape[-1])
    if group_type == 2:
        shape = (group_list.shape[0], *shape)
    return x.new_empty(shape, dtype=output_dtype)


@_fake("add_quant_matmul_")
def _(self: Tensor, x1, x2, x2_scale, x1_scale):
    return None


@_fake("add_quant_gmm_")
def _(self: Tensor, x1, x2, x2_scale, group_list, x1_scale, group_list_type):
    return None
