"""What Megatron takes from Apex, Transformer Engine or CUDA kernels, supplied in PyTorch.

Megatron's defaults then work as typed: no `--no-gradient-accumulation-fusion`,
`--no-persist-layer-norm`, `--no-masked-softmax-fusion` and the like.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import os
import sys
import warnings
from types import FunctionType, ModuleType
from typing import Any

import torch
from packaging.version import Version


def install() -> None:
    """Import Megatron and patch it."""
    wgrad = _weight_gradient_module()
    sys.modules[wgrad.__name__] = wgrad
    # Several modules announce that these optional packages are missing, which concerns nobody here.
    for message in ("Transformer Engine and Apex are not installed", "Apex is not installed", "absl.logging"):
        warnings.filterwarnings("ignore", message, UserWarning, module=r"megatron\.")

    from megatron.core import jit, utils
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mindspeed_lowp import megatron_versions

    for module in (layers, utils):
        module.fused_weight_gradient_mlp_cuda = wgrad
    layers._grad_accum_fusion_available = True
    FusedScaleMaskSoftmax.is_kernel_available = lambda self, mask, b, np, sq, sk: False
    WrappedTorchNorm.__new__ = staticmethod(_norm_for_any_config(WrappedTorchNorm.__new__))
    _uncompile(jit, megatron_versions.HAS_JIT_SWITCH)
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = _to_host
    _keep_adam_steps(DistributedOptimizer)
    rope_utils.fused_apply_rotary_pos_emb = _rotary_embedding(rope_utils._apply_rotary_pos_emb_bshd)
    YarnRotaryEmbedding.__init__ = _on_the_host(YarnRotaryEmbedding.__init__)
    if megatron_versions.HAS_MLA_ROPE_KERNEL:
        MLATransformerConfig.__post_init__ = _without_rope_kernel(MLATransformerConfig.__post_init__)
    if megatron_versions.NEEDS_TE_FOR_ITS_VERSION and importlib.util.find_spec("transformer_engine") is None:
        utils.get_te_version = lambda: Version("0.0.0")  # too old for everything
    if megatron_versions.WRITES_AS_OLD_TORCH:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._write_item = _in_torchs_format(filesystem_async._write_item)
    if megatron_versions.ROUTER_ASKS_FOR_TE_GEMM:
        moe_utils.te_general_gemm = None  # PyTorch's instead
    if megatron_versions.CHECKPOINTS_KNOW_FP8:
        random.CheckpointWithoutOutput.__init__ = _without_fp8(random.CheckpointWithoutOutput.__init__)
    if megatron_versions.COMPILES_FOR_RECOMPUTATION:
        random._get_share_storage = lambda: _restore
    if importlib.util.find_spec("megatron.training") is not None:
        _install_trainer(megatron_versions)


def _install_trainer(versions: ModuleType) -> None:
    if versions.TRAINER_IMPORTS_TRITON and importlib.util.find_spec("triton") is None:
        _replace_batch_invariant_kernels()
    from megatron.training import initialize, training

    for module in (initialize, training):
        # The warm-up of compiled functions: besides, its random draws depend on the tensor-parallel size.
        module.set_jit_fusion_options = lambda: None
    if versions.ALWAYS_ASKS_FOR_ONE_CONNECTION:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if versions.HAS_LEGACY_KERNELS:
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None  # compiles them, for softmax; `is_kernel_available` says no


def _replace_batch_invariant_kernels() -> None:
    """A module of Triton kernels, which the trainer imports for --batch-invariant-mode."""
    module = ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")

    def enable_batch_invariant_mode() -> None:
        raise RuntimeError("--batch-invariant-mode needs Triton, which is not installed: leave it out")

    module.enable_batch_invariant_mode = enable_batch_invariant_mode
    sys.modules[module.__name__] = module


def _uncompile(jit: ModuleType, has_switch: bool) -> None:
    """Undo `megatron.core.jit.jit_fuser`, which compiles element-wise functions with `torch.compile`.

    That needs a C++ compiler and minutes at start-up.
    """
    # In modules that are imported later:
    if has_switch:
        jit.disable_jit_fuser()
    else:
        jit.jit_fuser = lambda function: function
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
            for owner in (module, *classes):
                for attribute, value in list(vars(owner).items()):
                    if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
                        setattr(owner, attribute, value._torchdynamo_orig_callable)


def _rotary_embedding(unfused: Any) -> Any:
    """Transformer Engine's fused rotary embedding: Megatron's default, for t [sequence, batch, ...]."""

    def fused(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        return unfused(t, freqs, rotary_interleaved=interleaved)

    return fused


def _in_torchs_format(write_item: Any) -> Any:
    """`_write_item` of torch, called without the format that newer ones want to be told."""
    from torch.distributed.checkpoint import filesystem

    if "serialization_format" not in inspect.signature(write_item).parameters:
        return write_item
    return functools.partial(write_item, serialization_format=filesystem.SerializationFormat.TORCH_SAVE)


def _without_rope_kernel(post_init: Any) -> Any:
    """Multi-latent attention's fused rotary embedding is a Triton kernel; the other computes the same."""

    def wrapper(self: Any) -> None:
        self.apply_rope_fusion = False
        post_init(self)

    return wrapper


def _on_the_host(init: Any) -> Any:
    """`YarnRotaryEmbedding` enters `torch.device(<index of the CUDA device>)`, which no shim can redirect."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "use_cpu_initialization": True})

    return wrapper


def _without_fp8(init: Any) -> Any:
    """`CheckpointWithoutOutput` takes its own default, fp8=False, to mean Transformer Engine's FP8."""

    def wrapper(self: Any, fp8: Any = None) -> None:
        init(self, fp8=fp8 or None)

    return wrapper


def _restore(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give an output its discarded memory and values again, unseen by autograd, and by a copy.

    What Megatron compiles instead shares the memory. That needs a C++ compiler, and waits for ever behind
    the lock of a run that was killed while it compiled.
    """
    storage = recomputed.untyped_storage()
    output.untyped_storage().resize_(storage.nbytes())
    output.untyped_storage().copy_(storage)


def _weight_gradient_module() -> ModuleType:
    """Apex's `fused_weight_gradient_mlp_cuda`: gradient accumulation fusion is Megatron's default."""
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = _accumulate_in_fp32
    module.wgrad_gemm_accum_fp16 = _accumulate_in_16_bits
    return module


def _accumulate_in_fp32(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += grad_output.T @ total_input for an fp32 main_grad: no operand or sum is rounded."""
    main_grad.addmm_(grad_output.t().float(), total_input.float())


def _accumulate_in_16_bits(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += grad_output.T @ total_input for a bf16 or fp16 main_grad."""
    main_grad.copy_(torch.addmm(main_grad, grad_output.t(), total_input))


def _norm_for_any_config(original: Any) -> Any:
    """Let `WrappedTorchNorm` build torch norms under sequence parallelism.

    It refuses three options because the torch norms do not act on them. Two name a faster or leaner
    kernel for the same numbers. Sequence parallelism asks for the weights to be marked, so that
    `finalize_model_grads` adds up their gradients over the tensor-parallel ranks, each of which has seen
    its part of the sequence only.
    """

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.persist_layer_norm = False
        plain.memory_efficient_layer_norm = False
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` for the token dispatcher's split sizes, whatever their `is_cuda` says."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _keep_adam_steps(optimizer_class: type) -> None:
    """Let the distributed optimizer save and load the `step` that torch's Adam keeps for every parameter.

    Apex's and Transformer Engine's Adam keep one for all. `DistributedOptimizer.state_dict`, which
    loading calls too, wants it although an optimizer that has not stepped has none. `load_state_dict`
    gives all parameters the same tensor, which each of them would then increment, and at last overwrites
    it with the value from before loading. What loads a parameter's state skips the step, and then misses it.
    """
    save, load = optimizer_class.state_dict, optimizer_class.load_state_dict
    fill = optimizer_class._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> dict[str, Any]:
        if isinstance(self.optimizer, torch.optim.Adam):
            if not self.optimizer.state:
                self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
        return save(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            step = float(state_dict["optimizer"]["param_groups"][0]["step"])
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step)

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        fill(self, model_param, {"step": None, **tensors})  # None is left as it is

    optimizer_class.state_dict = state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states
    optimizer_class.load_state_dict = load_state_dict
