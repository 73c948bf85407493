"""Megatron's parallel linears with a recipe: the same modules, their matrix products quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mindspeed_lowp.layers import DelayedWeightGrads, TensorParallel, WeightCache, WeightGrad, lowp_linear
from mindspeed_lowp.megatron.delayed_scaling import KeepsHistory
from mindspeed_lowp.megatron_versions import tensor_parallel_group
from mindspeed_lowp.recipes import NOT_DIVIDED, Divided, Recipe, Role


def gather_quantized(chunks: Sequence[nn.Module]) -> None:
    """Let the column-parallel linears, which are about to be converted, gather their input quantized."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear):
                # Tokens come to experts through their dispatcher.
                module.quantized_gather = module.sequence_parallel and not module.explicit_expert_comm


def divided(*roles: Role, group: ProcessGroup) -> Divided:
    """These tensors of a layer are divided over `group`, unless it has one rank only."""
    return dict.fromkeys(roles, group) if group.size() > 1 else NOT_DIVIDED


class WithRecipe(KeepsHistory):
    """Replaces the one function through which a parallel linear multiplies.

    Everything else (sharding, initialization, checkpoints, the communication of the output) stays Megatron's.

    recipe: None multiplies in the parameters' precision, by Megatron's own functions.
    quantized_gather: under sequence parallelism, gather the input quantized.
    delayed: where a recipe's weight gradients are left for after backward.
    """

    recipe: Recipe | None = None
    quantized_gather: bool = False
    weight_cache: WeightCache | None = None
    delayed: DelayedWeightGrads | None = None

    @property
    def _forward_impl(self) -> Callable[..., Tensor]:
        """What Megatron's forward calls: a method of its layers, in 0.12 an attribute that it sets anew."""
        return self.multiply

    @_forward_impl.setter
    def _forward_impl(self, function: Callable[..., Tensor]) -> None:
        pass

    def multiply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = None,
    ) -> Tensor:
        """The signature is that of Megatron's linear_with_grad_accumulation_and_async_allreduce.

        tp_group: the group to communicate in; None where Megatron knows of one only (0.12).
        """
        if self.recipe is None:
            trainable = linear_with_grad_accumulation_and_async_allreduce
            groups = {} if tp_group is None else {"tp_group": tp_group}
            return (trainable if weight.requires_grad else linear_with_frozen_weight)(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer=grad_output_buffer,
                wgrad_deferral_limit=wgrad_deferral_limit,
                **groups,
            )
        parallel = None
        if sequence_parallel or allreduce_dgrad:
            parallel = TensorParallel(
                tensor_parallel_group(self) if tp_group is None else tp_group,
                sequence_parallel,
                allreduce_dgrad,
                self.quantized_gather,
            )
        weight_grad = WeightGrad(
            # Before data parallelism wraps the model there is no main_grad to fuse into.
            into_main_grad=gradient_accumulation_fusion and hasattr(weight, "main_grad"),
            later=grad_output_buffer,
            limit=wgrad_deferral_limit or 0,
            delayed=self.delayed,
        )
        return lowp_linear(
            input,
            weight,
            bias,
            self.recipe,
            parallel=parallel,
            weight_grad=weight_grad,
            weight_cache=self.weight_cache,
        )


class LowpColumnParallelLinear(WithRecipe, ColumnParallelLinear):
    """ColumnParallelLinear whose GEMMs a recipe quantizes."""

    def divided_tensors(self) -> Divided:
        rows = ("input",) if self.quantized_gather else ()
        return divided("weight", "grad", *rows, group=tensor_parallel_group(self))


class LowpRowParallelLinear(WithRecipe, RowParallelLinear):
    """RowParallelLinear whose GEMMs a recipe quantizes."""

    def divided_tensors(self) -> Divided:
        return divided("weight", "input", group=tensor_parallel_group(self))
