"""Pretrain a GPT model with Megatron's own trainer, from the megatron-core wheel alone.

Takes the flags of Megatron-LM's pretrain_gpt.py. Who has a Megatron-LM checkout uses that script instead,
either with `import mindspeed_lowp.adaptor` as its first line or through
`python -m mindspeed_lowp.run pretrain_gpt.py`.
"""

import mindspeed_lowp.adaptor  # noqa: F401, I001 - patches Megatron, so it comes first

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.core.datasets.utils
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

from mindspeed_lowp.memory import saved_bytes

_saved_bytes_reported = False

# What Megatron-LM's own script does for these flags is not done here.
UNSUPPORTED = (
    "check_for_spiky_loss",
    "experimental_attention_variant",
    "fim_data",
    "heterogeneous_layers_config_path",
    "hybrid_context_parallel",
    "mtp_num_layers",
    "per_dataset_sequences_path",
    "record_memory_history",
    "sft",
    "spec",
    "yaml_cfg",
)


def refuse_unsupported_flags(args: Namespace) -> None:
    for name in UNSUPPORTED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            sys.exit(f"{flag} is not supported by this script, but by the pretrain_gpt.py of Megatron-LM")


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the model."""
    args = get_args()
    refuse_unsupported_flags(args)
    config = config or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def forward_step(
    data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable]:
    """One micro-batch forward; returns the per-token losses and the function that sums them up.

    return_schedule_plan: in place of the losses, what computes them (`--overlap-moe-expert-parallel-comm`).
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    if return_schedule_plan:
        return output, partial(loss_func, loss_mask)
    report_saved_bytes(output, model)
    return output, partial(loss_func, loss_mask)


def report_saved_bytes(output: torch.Tensor, model: torch.nn.Module) -> None:
    """Say for the first micro-batch of training how much its forward pass keeps for backward."""
    global _saved_bytes_reported
    if output.requires_grad and not _saved_bytes_reported:
        _saved_bytes_reported = True
        saved = saved_bytes(output, model.parameters())
        print_rank_0(f"saved for backward in one micro-batch: {saved} bytes")


def get_batch(data_iterator: Iterator, vp_stage: int | None) -> tuple[torch.Tensor | None, ...]:
    """This rank's tokens, labels, loss mask, attention mask, position ids; None on inner pipeline stages."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return (None,) * 5
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    return tuple(batch[k] for k in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses of unmasked tokens, their number, and what to report."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * loss_mask)
    tokens = loss_mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for kind, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {kind} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def train_valid_test_datasets_provider(samples: list[int], vp_stage: int | None = None) -> list:
    """The three datasets, of at least so many samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def is_built_on_this_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, samples, is_built_on_this_rank, config).build()


if __name__ == "__main__":
    # The wheel carries these helpers built, and not the Makefile that Megatron would build them with.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    # Every rank calls the provider, and the builder decides by `is_built_on_this_rank`.
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
