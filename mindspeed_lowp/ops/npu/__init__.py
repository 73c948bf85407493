"""The same operators on an Ascend 950: one torch_npu call each. One module for each family of operators.

Dtypes are passed as torch dtypes where torch has them; torch turns them into the ScalarType numbers that
torch_npu reads.
"""

from types import ModuleType


def torch_npu() -> ModuleType:
    """torch_npu itself. Only an NPU tensor leads here, and torch_npu made it."""
    import torch_npu

    return torch_npu
