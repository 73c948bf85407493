"""Megatron's trainer on the modules of `--transformer-impl transformer_engine`, beside its local ones.

The arithmetic is the same, and so are losses, gradients and weights, to the last bit. One thing is not: the
norm of all gradients, summed in the order of the parameters, which stand elsewhere here. It matters only
where gradients are clipped by it, which these runs therefore do without.
"""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from ..trainer import MOE, MXFP8, succeeded, train

TE = ["--transformer-impl", "transformer_engine", "--clip-grad", "0"]
LOCAL = ["--transformer-impl", "local", "--clip-grad", "0"]
SEQUENTIAL = [flag for flag in MOE if flag != "--moe-grouped-gemm"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
# Norms by their names in local layers; those before experts keep theirs.
NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
BEFORE_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
NORMS_BEFORE_MLP = dict([BEFORE_MLP])


def run_both(folder, flags, ranks=1):
    runs = []
    for name, impl in {"local": LOCAL, "te": TE}.items():
        (folder / name).mkdir()
        runs.append(succeeded(train(folder / name, [*flags, *impl], ranks)))
    return runs


def assert_equal(local, te, experts=False):
    assert local.losses and te.losses == local.losses
    renamed = NORMS if experts else NORMS | NORMS_BEFORE_MLP
    for kind in ("first", "last", "grads"):
        tensors = getattr(te, kind)
        assert len(tensors) == len(getattr(local, kind))
        for name, expected in getattr(local, kind).items():
            for old, new in renamed.items():
                name = name.replace(old, new)
            assert torch.equal(tensors[name], expected), (kind, name)


@pytest.mark.parametrize(
    ("flags", "experts"),
    [
        pytest.param([], False, id="bf16"),
        pytest.param(
            [*MXFP8, "--mxfp8-defer-backward-quant", *RECOMPUTE, "--global-batch-size", "4"],
            False,
            id="mxfp8-deferred-recompute-accumulate",
        ),
        pytest.param(
            [*MXFP8, *SEQUENTIAL, "--no-gradient-accumulation-fusion"], True, id="sequential-mxfp8-unfused"
        ),
        pytest.param([*MXFP8, *MOE, "--recompute-activations"], True, id="grouped-mxfp8-selective-recompute"),
    ],
)
def test_trains_like_the_local_modules(tmp_path, flags, experts):
    [local], [te] = run_both(tmp_path, [*flags, "--train-iters", "12"])
    assert_equal(local, te, experts)
    if "--fp8-format" in flags:
        [count] = [line for line in local.output.splitlines() if line.startswith("Swapped to MXLinear_NPU")]
        assert count in te.output.splitlines()


@pytest.mark.parametrize(
    ("flags", "experts"),
    [
        pytest.param([*MXFP8], False, id="mxfp8"),
        pytest.param([*MXFP8, *SEQUENTIAL, "--sequence-parallel"], True, id="sequential-mxfp8-sp"),
    ],
)
def test_two_ranks_train_like_the_local_modules(tmp_path, flags, experts):
    flags = [*flags, "--tensor-model-parallel-size", "2", "--train-iters", "6"]
    for local, te in zip(*run_both(tmp_path, flags, ranks=2), strict=True):
        assert_equal(local, te, experts)


@pytest.mark.parametrize("experts", [[], MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(("first", "second"), [(LOCAL, TE), (TE, LOCAL)], ids=["local-first", "te-first"])
def test_checkpoints_move_between_the_implementations(tmp_path, first, second, experts):
    save = ["--save", "checkpoint", "--save-interval", "3"]
    [through] = succeeded(train(tmp_path, [*MXFP8, *experts, *first, "--train-iters", "6", *save]))
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    resume = ["--train-iters", "6", "--load", "checkpoint", "--save", "resumed", "--save-interval", "6"]
    [resumed] = succeeded(train(tmp_path, [*MXFP8, *experts, *second, *resume]))
    assert len(resumed.losses) == 3
    through.losses = through.losses[3:]
    through.first = resumed.first = {}
    assert_equal(*((through, resumed) if first is LOCAL else (resumed, through)), bool(experts))
    entries = [
        FileSystemReader(tmp_path / folder / "iter_0000006").read_metadata().state_dict_metadata.keys()
        for folder in ("checkpoint", "resumed")
    ]
    as_local = [{key.replace(*BEFORE_MLP) if experts else key for key in keys} for keys in entries]
    assert as_local[0] == as_local[1]
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in entries[0]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(
            "--normalization RMSNorm --apply-layernorm-1p --qk-layernorm --swiglu --disable-bias-linear "
            "--group-query-attention --num-query-groups 2 --softmax-type learnable "
            "--position-embedding-type rope --untie-embeddings-and-output-weights",
            1,
            id="llama-like",
        ),
        # Down-projections that every rank has whole, of attention and of experts.
        pytest.param(
            "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-layernorm "
            "--position-embedding-type rope --disable-bias-linear --num-experts 4 "
            "--moe-grouped-gemm --moe-latent-size 32 --moe-shared-expert-intermediate-size 64 "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
            id="deepseek-like",
        ),
    ],
)
def test_trains_what_local_modules_cannot(tmp_path, flags, ranks):
    runs = succeeded(train(tmp_path, [*MXFP8, *TE[:2], "--train-iters", "12", *flags.split()], ranks))
    assert runs[0].losses == runs[-1].losses and runs[0].losses[-1] < runs[0].losses[0] - 0.05
    for moment in ("first", "last"):
        for name in runs[0].first.keys() - runs[0].sharded:
            if ".experts." not in name:
                left, right = (getattr(run, moment)[name] for run in (runs[0], runs[-1]))
                assert torch.equal(left, right), (moment, name)


def test_flags_beyond_these_modules_stop(tmp_path):
    [run] = train(tmp_path, [*TE, "--use-te-activation-func", "--train-iters", "1"])
    assert run.exit_code == 1 and "Traceback" not in run.output
    assert "error: --use-te-activation-func needs the kernels of Transformer Engine" in run.output
