"""Parallel linears under Transformer Engine's names, without it; in high precision or by a recipe.

Column and row parallelism are Megatron's own: sharding, communication, initialization and checkpoints are
those of `--transformer-impl local`. What is added is Transformer Engine's constructors, and a layer norm in
front.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from mindspeed_lowp.megatron.delayed_wgrad import DelaysWeightGrad
from mindspeed_lowp.megatron.linear import (
    LowpColumnParallelLinear,
    LowpRowParallelLinear,
    WithRecipe,
    divided,
)
from mindspeed_lowp.megatron.te_norm import new_norm_parameters, normalize
from mindspeed_lowp.recipes import NOT_DIVIDED, Divided


class TELinear(DelaysWeightGrad, WithRecipe, torch.nn.Module):
    """A linear whose whole weight every tensor-parallel rank has: for down-projections, which are narrow.

    parallel_mode: "duplicated" or None; the others are classes of their own.
    """

    parallel_mode = None  # what Transformer Engine calls it

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], None],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        if parallel_mode not in (None, "duplicated"):
            raise ValueError(
                f"TELinear: parallel_mode={parallel_mode!r}: build TEColumnParallelLinear for column, "
                "TERowParallelLinear for row"
            )
        if tp_group is not None:
            raise ValueError("TELinear: a duplicated linear is not divided over any tp_group: leave it out")
        _check(
            config,
            skip_weight_param_allocation=skip_weight_param_allocation,
            symmetric_ar_type=symmetric_ar_type is not None,
        )
        super().__init__()
        self.config = config
        self.in_features, self.out_features = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        self.tp_group = get_tensor_model_parallel_group_if_none(None, is_expert=is_expert)

        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"device": device, "dtype": config.params_dtype}
        self.weight = Parameter(torch.empty(output_size, input_size, **options))
        self.register_parameter("bias", Parameter(torch.zeros(output_size, **options)) if bias else None)
        if config.perform_initialization:
            with _replicated_random_state(config, is_expert):
                init_method(self.weight)
        for parameter in self.parameters():
            parameter.allreduce = not (is_expert and config.expert_model_parallel_size > 1)
            if not is_expert:
                # Under sequence parallelism each rank's gradient is that of its own rows.
                parameter.sequence_parallel = config.sequence_parallel
        if config.delay_wgrad_compute:
            self.delay_weight_grads([self.weight])
        self._register_load_state_dict_pre_hook(
            lambda state_dict, prefix, *_: state_dict.setdefault(f"{prefix}_extra_state")
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., in_features] -> [..., out_features], and the bias if that is left to the caller."""
        y = self.multiply(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
        return y, self.bias if self.skip_bias_add else None

    def divided_tensors(self) -> Divided:
        # Under sequence parallelism each rank has its own rows.
        rows_differ = self.config.sequence_parallel and not self.is_expert
        return divided("input", "grad", group=self.tp_group) if rows_differ else NOT_DIVIDED

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Every entry whole, replicated over the tensor-parallel group."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class TEColumnParallelLinear(DelaysWeightGrad, LowpColumnParallelLinear):
    """Output features divided over the tensor-parallel group; the output is not gathered."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], None],
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
    ) -> None:
        _check(config, gather_output=gather_output, skip_weight_param_allocation=skip_weight_param_allocation)
        super().__init__(
            input_size,
            output_size,
            config=_without_deferral(config),
            init_method=init_method,
            bias=bias,
            stride=stride,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
        )
        if config.delay_wgrad_compute:
            self.delay_weight_grads([self.weight])


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """A layer norm, and a column-parallel linear of what it gives.

    The norm is that of `config.normalization`; its parameters are layer_norm_weight and layer_norm_bias.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], None],
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
    ) -> None:
        if is_expert:
            raise ValueError("TELayerNormColumnParallelLinear: experts have no layer norm of their own")
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            gather_output=gather_output,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            skip_weight_param_allocation=skip_weight_param_allocation,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
            stride=stride,
        )
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.layer_norm_weight, norm_bias = new_norm_parameters(config, input_size)
        self.register_parameter("layer_norm_bias", norm_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [s, ..., input_size] -> [s, ..., this rank's outputs], and the bias or None.

        Under sequence parallelism x holds this rank's part of the first dimension.
        """
        return super().forward(
            normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        )


class TERowParallelLinear(DelaysWeightGrad, LowpRowParallelLinear):
    """Input features divided over the tensor-parallel group, over which the output is summed."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], None],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        if not input_is_parallel:
            raise ValueError("TERowParallelLinear: input_is_parallel=False is not supported: pass True")
        _check(config)
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
        )
        if config.delay_wgrad_compute:
            self.delay_weight_grads([self.weight])


def _check(config: ModelParallelConfig, **options: bool) -> None:
    """Raise ValueError for constructor options that Transformer Engine refuses too, and for its own flags."""
    for option, is_set in options.items():
        if is_set:
            raise ValueError(f"Transformer Engine's linears do not support {option}: leave it out")
    for flag in ("tp_comm_overlap", "symmetric_ar_type"):
        if getattr(config, flag, None):
            raise ValueError(f"--{flag.replace('_', '-')} needs Transformer Engine's kernels: leave it out")


def _without_deferral(config: ModelParallelConfig) -> ModelParallelConfig:
    """--defer-embedding-wgrad-compute is for the output layer; Megatron's linears apply it to themselves."""
    if not config.defer_embedding_wgrad_compute:
        return config
    config = copy.copy(config)
    config.defer_embedding_wgrad_compute = False
    return config


def _replicated_random_state(config: ModelParallelConfig, is_expert: bool) -> AbstractContextManager:
    """The random state that gives every tensor-parallel rank the same weight."""
    tracker = get_cuda_rng_tracker()
    if config.use_cpu_initialization or not tracker.is_initialized():
        return nullcontext()
    if is_expert:
        return tracker.fork(get_expert_parallel_rng_tracker_name())
    return tracker.fork(get_data_parallel_rng_tracker_name())
