"""torch_npu's constants for formats that torch has no dtype for, or had none when torch_npu named them."""

from __future__ import annotations

import torch

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, E8M0_NPU_CODE, HIF8

hifloat8 = HIF8.npu_code
float8_e5m2 = E5M2.npu_code
float8_e4m3fn = E4M3.npu_code
float8_e8m0fnu = E8M0_NPU_CODE
float4_e2m1fn_x2 = E2M1.npu_code
float4_e1m2fn_x2 = E1M2.npu_code

#: Dtypes that NPU tensors cannot have.
unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
