"""Grouped expert linears under Transformer Engine's names, without it; in high precision or by a recipe.

They take the place of `TEColumnParallelGroupedLinear` and `TERowParallelGroupedLinear` in Megatron's
`TEGroupedMLP`: E parameters weight0, weight1, ... of [N, K], and checkpoints that SequentialMLP reads too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor
from torch.nn import Parameter

from mindspeed_lowp.layers import WeightCache, lowp_grouped_linear
from mindspeed_lowp.megatron.delayed_scaling import KeepsHistory
from mindspeed_lowp.megatron.delayed_wgrad import DelaysWeightGrad
from mindspeed_lowp.megatron.linear import divided
from mindspeed_lowp.recipes import Divided, Recipe


class TEGroupedLinear(DelaysWeightGrad, KeepsHistory, torch.nn.Module):
    """`num_gemms` linears, each for its own run of rows. The token dispatcher does all communication.

    recipe: None multiplies in the parameters' precision.
    """

    partition_dim: int  # of a weight [N, K], over the expert tensor-parallel group
    bias_is_sharded: bool
    weight_cache: WeightCache | None = None

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], None],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        if not is_expert:
            raise ValueError("grouped linears are for experts: is_expert must be True")
        self.config = config
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.skip_bias_add = skip_bias_add
        self.recipe: Recipe | None = None
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()

        full_shape = (output_size, input_size)
        shape = list(full_shape)
        shape[self.partition_dim] = divide(shape[self.partition_dim], self._groups.expt_tp.size())
        for index in range(num_gemms):
            weight = self._new_parameter(*shape)
            if config.perform_initialization:
                self._initialize(weight, full_shape, init_method)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                bias_parameter = self._new_parameter(shape[0] if self.bias_is_sharded else output_size)
                set_tensor_model_parallel_attributes(bias_parameter, self.bias_is_sharded, 0, 1)
                torch.nn.init.zeros_(bias_parameter)
                self.register_parameter(f"bias{index}", bias_parameter)
        if config.delay_wgrad_compute:
            self.delay_weight_grads(self._weights())
        self._register_load_state_dict_pre_hook(_join_extra_states)

    def _weights(self) -> list[Parameter]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def _new_parameter(self, *shape: int) -> Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = Parameter(torch.empty(shape, device=device, dtype=self.config.params_dtype))
        # False tells data parallelism to reduce over the ranks that hold the same expert only.
        parameter.allreduce = not self.config.expert_model_parallel_size > 1
        return parameter

    def _initialize(self, weight: Parameter, full_shape: tuple[int, int], init_method: Callable) -> None:
        if not self.config.use_cpu_initialization:
            _initialize_affine_weight_gpu(weight, init_method, self.partition_dim, is_expert=True)
            return
        _initialize_affine_weight_cpu(
            weight,
            *full_shape,
            weight.shape[self.partition_dim],
            self.partition_dim,
            init_method,
            params_dtype=self.config.params_dtype,
            rank=self._groups.expt_tp.rank(),
            world_size=self._groups.expt_tp.size(),
        )

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> tuple[Tensor, list[Tensor] | None]:
        """x: [T, K], tokens sorted by expert; tokens_per_expert: counts that sum to T.

        -> [T, N], and the biases one by one when skip_bias_add leaves them to the caller.
        """
        weights = self._weights()
        if self.recipe is None:
            parts = x.split(list(tokens_per_expert))
            y = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
        else:
            fused = self.config.gradient_accumulation_fusion and hasattr(weights[0], "main_grad")
            y = lowp_grouped_linear(
                x,
                weights,
                tokens_per_expert,
                self.recipe,
                into_main_grad=fused,
                delayed=self.delayed,
                weight_cache=self.weight_cache,
            )
        if not self.use_bias:
            return y, None
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        if self.skip_bias_add:
            return y, biases
        parts = y.split(list(tokens_per_expert))
        return torch.cat([part + bias for part, bias in zip(parts, biases, strict=True)]), None

    def divided_tensors(self) -> Divided:
        other = "grad" if self.partition_dim == 0 else "input"
        return divided("weight", other, group=self._groups.expt_tp)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """One entry an expert, under the keys that SequentialMLP and Transformer Engine give it."""
        experts_here, rank = self.num_gemms, self._groups.ep.rank()
        all_experts = experts_here * self._groups.ep.size()
        single_shards = metadata.get("singleton_local_shards", False)
        axes = {"weight": self.partition_dim} | ({"bias": 0} if self.bias_is_sharded else {})
        result = {}
        for index in range(experts_here):
            expert = rank * experts_here + index
            state = {"weight": getattr(self, f"weight{index}"), "_extra_state": self.get_extra_state()}
            if self.use_bias:
                state["bias"] = getattr(self, f"bias{index}")
            offsets, key_prefix = (*sharded_offsets, (len(sharded_offsets), expert, all_experts)), prefix
            if single_shards:
                offsets, key_prefix = sharded_offsets, f"{expert}.{prefix}"
            shards = make_sharded_tensors_for_checkpoint(
                state,
                "",
                axes,
                offsets,
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shards, "", key_prefix)
            for name, shard in shards.items():
                # Copies of an expert are found along data parallelism within its own ranks.
                shard.replica_id = (*shard.replica_id[:2], self._groups.expt_dp.rank())
                suffix = "" if name == "_extra_state" and index == 0 else index
                result[f"{prefix}{name}{suffix}"] = shard
        return result


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Each expert's output features are divided over the expert tensor-parallel group."""

    partition_dim = 0
    bias_is_sharded = True


class TERowParallelGroupedLinear(TEGroupedLinear):
    """Each expert's input features are divided over the expert tensor-parallel group."""

    partition_dim = 1
    bias_is_sharded = False


def _join_extra_states(state_dict: dict, prefix: str, *_: object) -> None:
    """Checkpoints carry an `_extra_state` for each expert, alike, or none; the module has a single one."""
    keys = [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]
    states = [state_dict.pop(key) for key in keys]
    state_dict[f"{prefix}_extra_state"] = states[0] if states else None
