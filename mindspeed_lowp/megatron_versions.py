"""The versions of Megatron core that are supported, and all that differs between them.

    0.12, 0.16  `--moe-grouped-gemm` builds `GroupedMLP`, over the operator of the package grouped_gemm
    0.17        it builds `TEGroupedMLP`, over linears under Transformer Engine's names

Importing it imports Megatron.
"""

from __future__ import annotations

from megatron.core import __version__, parallel_state
from torch import nn
from torch.distributed import ProcessGroup

VERSION = tuple(int(part) for part in __version__.split(".")[:2])

# Grouped experts are `GroupedMLP`, without biases, and the package grouped_gemm may be missing.
HAS_GROUPED_MLP = VERSION < (0, 17)

# `megatron.core.extensions.transformer_engine` can be imported without Transformer Engine, and the choice of
# its modules is in one class, whose signatures are those of our `TESpecProvider`.
HAS_REPLACEABLE_TRANSFORMER_ENGINE = VERSION >= (0, 17)

# Checkpoints keep the optimizer's state under parameters' names, whichever of several optimizers has it.
SAVES_OPTIMIZER_STATE_BY_PARAMETER = VERSION >= (0, 16)

# --- For the runtime.

# Asked whether Transformer Engine is of some version, it imports that.
NEEDS_TE_FOR_ITS_VERSION = VERSION < (0, 16)

# Checkpoints are written by a function of torch that has got one more argument since.
WRITES_AS_OLD_TORCH = VERSION < (0, 16)

# `jit_fuser` can be turned off for modules that are imported later.
HAS_JIT_SWITCH = VERSION >= (0, 16)

# `CheckpointWithoutOutput` has the argument fp8.
CHECKPOINTS_KNOW_FP8 = VERSION >= (0, 16)

# A recomputed output takes its place by a C++ function that is compiled when it is first needed.
COMPILES_FOR_RECOMPUTATION = VERSION >= (0, 17)

# The router asks for `moe_utils.te_general_gemm`, which is not defined without Transformer Engine.
ROUTER_ASKS_FOR_TE_GEMM = VERSION == (0, 16)

# Multi-latent attention has a fused rotary embedding, a Triton kernel, and turns it on by itself.
HAS_MLA_ROPE_KERNEL = VERSION >= (0, 16)

# The trainer imports Triton, whether it is needed or not.
TRAINER_IMPORTS_TRITON = VERSION == (0, 16)

# The trainer asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which orders kernels, on every device.
ALWAYS_ASKS_FOR_ONE_CONNECTION = VERSION < (0, 16)

# The trainer compiles CUDA kernels at its start (`megatron.legacy.fused_kernels`).
HAS_LEGACY_KERNELS = VERSION < (0, 17)


def tensor_parallel_group(linear: nn.Module) -> ProcessGroup:
    """The group that one of Megatron's parallel linears is divided over."""
    if VERSION >= (0, 16):
        return linear.tp_group
    if linear.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
