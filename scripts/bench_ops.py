"""How fast the operators are: ratios to a copy of the same tensor; a linear layer and a GPT against bf16.

    python scripts/bench_ops.py [--quick] [--threads 2] [--reference] [--torchao]

Each figure is the shortest of many runs, and the candidates take turns within one process, so that a
disturbance on a shared machine hits all of them. `copy` is `y.copy_(x)` into memory that is already there;
the operators allocate their results, as they do in training.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_lowp import get_recipe, lowp_linear, ops
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.ops import gemm, kernels
from mindspeed_lowp.ops.reference import mx as reference

E4M3 = torch.float8_e4m3fn
LIMITS = {
    "dynamic_mx_quant axis=-1": 2.0,
    "dynamic_mx_quant_with_dual_axis": 3.0,
}  # times copy, at 4096 x 4096
LINEAR_LIMIT = 1.10
SAVED_LIMIT = 0.52
GPT_LIMIT = 1.20

GPT_FLAGS = """
    --transformer-impl local --num-layers 4 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --attention-dropout 0 --hidden-dropout 0
    --train-iters 4 --lr 1e-4 --log-interval 1 --eval-iters 0 --eval-interval 100 --bf16
""".split()


def shortest(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each candidate's fastest run; the candidates take turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "unknown CPU"


def operators(
    rows: int, columns: int, with_reference: bool, with_torchao: bool
) -> dict[str, Callable[[], object]]:
    x = torch.randn(rows, columns).bfloat16()
    copy = torch.empty_like(x)
    last, last_scale, second, second_scale = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3)
    turned = (last.t(), last_scale.transpose(0, 1))
    ends = torch.arange(1, 9) * rows // 8

    def anti(codes: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Callable[[], object]:
        return lambda: ops.anti_mx_quant(codes, scale, axis=axis, dst_type=dtype)

    candidates = {
        "copy": lambda: copy.copy_(x),
        "dynamic_mx_quant axis=-1": lambda: ops.dynamic_mx_quant(x, dst_type=E4M3),
        "dynamic_mx_quant axis=-2": lambda: ops.dynamic_mx_quant(x, axis=-2, dst_type=E4M3),
        "dynamic_mx_quant axis=-1, scale_alg=1": lambda: ops.dynamic_mx_quant(x, dst_type=E4M3, scale_alg=1),
        "dynamic_mx_quant_with_dual_axis": lambda: ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3),
        "grouped_dynamic_mx_quant, 8 groups": lambda: ops.grouped_dynamic_mx_quant(x, ends, dst_type=E4M3),
        "dynamic_mx_quant axis=-1, E2M1": lambda: ops.dynamic_mx_quant(x),
        "dynamic_mx_quant_with_dual_axis, E2M1": lambda: ops.dynamic_mx_quant_with_dual_axis(x),
        "dynamic_block_mx_quant": lambda: ops.dynamic_block_mx_quant(x, dst_type=E4M3),
        "anti_mx_quant axis=-1 to bf16": anti(last, last_scale, -1, torch.bfloat16),
        "anti_mx_quant axis=-2 to bf16": anti(second, second_scale, -2, torch.bfloat16),
        "anti_mx_quant axis=-1 to fp32": anti(last, last_scale, -1, torch.float32),
        "anti_mx_quant of a transposed view to bf16": anti(*turned, 0, torch.bfloat16),
        "anti_mx_quant of a transposed view to fp32": anti(*turned, 0, torch.float32),
    }
    if with_reference:
        candidates["reference: dynamic_mx_quant axis=-1"] = lambda: reference.dynamic_mx_quant(
            x, 1, 292, "rint", 32, 0, 0.0, 0.0
        )
    if with_torchao:
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        candidates["torchao: to_mx"] = lambda: to_mx(x, E4M3, 32)
    return candidates


class UpcastLinear(torch.autograd.Function):
    """A bf16 linear by fp32 GEMMs: the fastest there is on a CPU without bf16 instructions."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        x, weight = (t.float() for t in ctx.saved_tensors)
        grad = grad.float()
        return (grad @ weight).bfloat16(), (grad.t() @ x).bfloat16()


def linears(size: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(size, size).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(size, size).bfloat16() / size**0.5)
    grad = torch.randn(size, size).bfloat16()

    def training_step(forward: Callable[[], Tensor]) -> Callable[[], object]:
        def run() -> None:
            x.grad = weight.grad = None
            forward().backward(grad)

        return run

    if gemm.bf16_gemm_is_native():
        baseline = training_step(lambda: torch.nn.functional.linear(x, weight))
    else:
        baseline = training_step(lambda: UpcastLinear.apply(x, weight))
    candidates = {"bf16": baseline}
    for name, defer in (("mxfp8", False), ("mxfp8, deferred", True)):
        recipe = get_recipe("mxfp8", fp8_format="e4m3", defer_backward_quant=defer)
        candidates[name] = training_step(lambda recipe=recipe: lowp_linear(x, weight, None, recipe))
    return candidates


def bytes_kept(size: int) -> dict[str, float]:
    """Bytes that one linear keeps for backward over those of bf16, Parameters' own not counted."""
    x = torch.randn(size, size).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(size, size).bfloat16())
    bf16 = saved_bytes(torch.nn.functional.linear(x, weight), [weight])
    kept = {}
    for name, defer in (("mxfp8", False), ("mxfp8, deferred", True)):
        recipe = get_recipe("mxfp8", fp8_format="e4m3", defer_backward_quant=defer)
        kept[name] = saved_bytes(lowp_linear(x, weight, None, recipe), [weight]) / bf16
    return kept


def gpt_steps() -> dict[str, float]:
    """Seconds of the fastest training step of a GPT, by Megatron's trainer; the candidates take turns."""
    mxfp8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    candidates = {"bf16": [], "mxfp8": mxfp8, "mxfp8, deferred": [*mxfp8, "--mxfp8-defer-backward-quant"]}
    script = Path(__file__).with_name("pretrain_gpt.py")
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(2):
        for name, flags in candidates.items():
            command = [sys.executable, str(script), *GPT_FLAGS, *flags]
            log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            steps = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)
            best[name] = min([best[name], *(float(ms) / 1e3 for ms in steps)])
    return best


def torch_bf16_against_fp32(size: int) -> tuple[float, float]:
    """Seconds of torch's own bf16 matmul and of its fp32 one."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    half_a, half_b = a.bfloat16(), b.bfloat16()
    best = shortest({"bf16": lambda: half_a @ half_b, "fp32": lambda: a @ b}, 3)
    return best["bf16"], best["fp32"]


def row(name: str, seconds: float, ratio: float, limit: float | None) -> str:
    verdict = "" if limit is None else f"  limit {limit:.2f} {'ok' if ratio <= limit else 'EXCEEDED'}"
    return f"  {name:<45} {seconds * 1e3:10.3f} ms {ratio:8.2f}{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the linear at 1024 only, no GPT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="also time the PyTorch reference (slow)")
    parser.add_argument("--torchao", action="store_true", help="also time torchao's to_mx (slow)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    levels = ", ".join(kernels.supported_levels()) or "none: the PyTorch reference serves"
    print(
        f"{cpu_model()}; {options.threads} threads; torch {torch.__version__}; kernel levels here: {levels}"
    )
    for rows, columns in ((4096, 4096), (64, 1024)):
        rounds = (10 if options.quick else 80) if rows == 4096 else 500
        best = shortest(operators(rows, columns, options.reference, options.torchao), rounds)
        print(f"\nbf16 {rows} x {columns}: shortest of {rounds}, ratio to copy")
        for name, seconds in best.items():
            print(row(name, seconds, seconds / best["copy"], LIMITS.get(name) if rows == 4096 else None))

    size = 1024 if options.quick else 4096
    rounds = 3
    best = shortest(linears(size), rounds)
    print(f"\nlinear forward + backward, T=K=N={size}: shortest of {rounds}, ratio to bf16")
    for name, seconds in best.items():
        limited = size == 4096 and name != "bf16"
        print(row(name, seconds, seconds / best["bf16"], LINEAR_LIMIT if limited else None))
    if not gemm.bf16_gemm_is_native():
        bf16, fp32 = torch_bf16_against_fp32(512)
        print(
            "  This CPU has no bf16 instructions, so the bf16 linear above multiplies in fp32: torch's own\n"
            f"  bf16 matmul of 512 x 512 takes {bf16 * 1e3:.2f} ms, its fp32 one {fp32 * 1e3:.2f} ms."
        )

    print(f"\nbytes that this linear keeps for backward, Parameters not counted, over bf16's, T=K=N={size}")
    for name, ratio in bytes_kept(size).items():
        verdict = (
            "" if name == "mxfp8" else f"  limit {SAVED_LIMIT} {'ok' if ratio <= SAVED_LIMIT else 'EXCEEDED'}"
        )
        print(f"  {name:<45} {ratio:22.4f}{verdict}")

    if not options.quick:
        best = gpt_steps()
        print("\nGPT training step (hidden 1024, 4 layers, sequence 1024): shortest of 8, ratio to bf16")
        for name, seconds in best.items():
            print(row(name, seconds, seconds / best["bf16"], None if name == "bf16" else GPT_LIMIT))


if __name__ == "__main__":
    main()
