"""Registration of `torch.library` operators, and which implementation serves which device.

| device                            | implementation                                                    |
|-----------------------------------|-------------------------------------------------------------------|
| Ascend 950 or newer (PrivateUse1) | torch_npu (`npu/`)                                                |
| CPU                               | C++ (`kernels/`), or the reference where it was not built          |
| anything else                     | the reference (`reference/`), on the device                       |

Each operator is registered in the module of its public function, which checks the arguments: `torch.ops.lowp`
called directly trusts them, and reads and writes where they point. Plain `Library.define` and `impl`, because
a `custom_op` costs several times more Python for each call.
"""

from collections.abc import Callable

import torch

from mindspeed_lowp.ops import hardware, kernels

_library = torch.library.Library("lowp", "DEF")


def operator(
    schema: str,
    *,
    reference: Callable,
    kernel: Callable,
    npu: Callable,
    fake: Callable,
    older_npu: Callable | None = None,
) -> torch._ops.OpOverload:
    """Register the operator ``schema`` (name, parameters and results) and return it.

    ``fake`` gives shapes, dtypes and strides of the results for FakeTensor and `torch.compile`. ``older_npu``
    serves NPUs before Ascend 950, where that is not the reference.
    """
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    name = schema[: schema.index("(")]
    _library.impl(name, reference, "CompositeExplicitAutograd")
    _library.impl(name, by_npu_generation(npu, older_npu or reference), "PrivateUse1")
    if kernels.available():
        _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"lowp::{name}", on_one_device(fake), lib=_library)
    return getattr(torch.ops.lowp, name).default


def on_one_device(fake: Callable) -> Callable:
    """``fake``, refusing tensors of other devices beside meta tensors: its results would hold no values."""

    def checked(*args):
        devices = {str(arg.device) for arg in args if isinstance(arg, torch.Tensor)}
        if len(devices) > 1:
            raise ValueError(
                f"all tensors must be on one device, but these are on {' and '.join(sorted(devices))}"
            )
        return fake(*args)

    return checked


def by_npu_generation(native: Callable, emulated: Callable) -> Callable:
    """``native`` on an Ascend 950 or newer, ``emulated`` on an older NPU; asked when an NPU tensor comes."""

    def kernel(*args):
        return (native if hardware.npu_has_mx() else emulated)(*args)

    return kernel
