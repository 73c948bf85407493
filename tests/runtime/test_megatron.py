from __future__ import annotations

import sys
import types

import torch


def check_norms() -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import TransformerConfig

    for normalization in ("LayerNorm", "RMSNorm"):
        for parallel in (False, True):
            config = TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                normalization=normalization,
                tensor_model_parallel_size=2,
                sequence_parallel=parallel,
                persist_layer_norm=True,
            )
            build = LocalSpecProvider().layer_norm(rms_norm=normalization == "RMSNorm")
            norm = build(config=config, hidden_size=8, eps=1e-3)
            assert type(norm) is getattr(torch.nn, normalization) and norm.eps == 1e-3
            assert all(p.sequence_parallel is parallel for p in norm.parameters())
            assert config.sequence_parallel is parallel and config.persist_layer_norm is True


def test_norms_accept_sequence_parallelism(emulated) -> None:
    emulated(check_norms)


def check_weight_gradient() -> None:
    import fused_weight_gradient_mlp_cuda as wgrad
    from megatron.core.tensor_parallel import layers

    assert layers._grad_accum_fusion_available
    torch.manual_seed(0)
    x, g = torch.randn(40, 6).bfloat16(), torch.randn(40, 4).bfloat16()
    before = torch.randn(4, 6).bfloat16()
    expected = before.double() + g.double().t() @ x.double()

    main_grad = before.float()
    wgrad.wgrad_gemm_accum_fp32(x, g, main_grad)
    torch.testing.assert_close(main_grad.double(), expected, rtol=1e-6, atol=1e-5)

    main_grad = before.clone()
    wgrad.wgrad_gemm_accum_fp16(x, g, main_grad)
    torch.testing.assert_close(main_grad.double(), expected, rtol=1.001 * 2**-8, atol=1e-5)


def test_weight_gradients_accumulate(emulated) -> None:
    emulated(check_weight_gradient)


def check_fused_functions() -> None:
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_gelu import bias_gelu
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.torch_norm import L2Norm

    for function in (bias_dropout_add_fused_train, bias_gelu, L2Norm._norm):
        assert type(function) is types.FunctionType
        assert not hasattr(function, "_torchdynamo_orig_callable")
    assert not any(
        isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for value in vars(module).values()
    )
    assert FusedScaleMaskSoftmax.is_kernel_available(None, None, 4, 4, 64, 64) is False


def test_no_function_is_compiled(emulated) -> None:
    emulated(check_fused_functions)


def check_recomputation() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random
    from torch.utils import cpp_extension

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    def compiles(*args: object, **kwargs: object) -> None:
        raise AssertionError("a C++ function is compiled")

    random.load_inline = cpp_extension.load_inline = cpp_extension.load = compiles

    x = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    weight = torch.randn(8, 8, dtype=torch.double, requires_grad=True)

    def loss(recompute: bool) -> torch.Tensor:
        checkpoint = random.CheckpointWithoutOutput()
        h = checkpoint.checkpoint(torch.tanh, x) if recompute else torch.tanh(x)
        y = h.view(8, 5).view(5, 8) @ weight  # saves a view of h
        if recompute:
            checkpoint.discard_output_and_register_recompute(y)
            assert h.untyped_storage().nbytes() == 0
        return y.square().sum()

    expected = torch.autograd.grad(loss(recompute=False), (x, weight))
    loss(recompute=True).backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_recomputed_outputs_return_and_nothing_is_compiled(emulated) -> None:
    emulated(check_recomputation)


def check_split_sizes() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert [int(n) for n in sizes] == [1, 2] and not isinstance(sizes, torch.Tensor)
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_split_sizes_become_arrays(emulated) -> None:
    emulated(check_split_sizes)
