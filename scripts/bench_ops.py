"""How fast the operators are: ratios to a copy of the same tensor; a linear layer and a GPT against bf16.

    python scripts/bench_ops.py [--quick] [--threads 2] [--reference] [--torchao] [--markdown FILE]

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
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_lowp import get_recipe, lowp_linear, ops
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.ops import gemm, kernels

E4M3, E2M1, HIF8 = torch.float8_e4m3fn, 296, 290
LIMITS = {
    "dynamic_mx_quant axis=-1": 2.0,
    "dynamic_mx_quant_with_dual_axis": 3.0,
    "quant_dequant_mxfp4": 3.0,
    "dynamic_quant pertensor, HiFloat8": 4.0,
}  # times copy, at 4096 x 4096
CALL_LIMIT = 30  # microseconds
LINEAR_LIMIT = 1.10
SAVED_LIMIT = 0.52
GPT_LIMIT = 1.20

GPT_FLAGS = """
    --transformer-impl local --num-layers 4 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --attention-dropout 0 --hidden-dropout 0
    --train-iters 4 --lr 1e-4 --log-interval 1 --eval-iters 0 --eval-interval 100 --bf16
""".split()


class Table:
    """Figures by name, printed as they come and kept for Markdown."""

    def __init__(self, title: str, columns: list[str]) -> None:
        self.title, self.columns, self.rows = title, columns, []

    def add(self, name: str, *cells: str) -> None:
        self.rows.append((name, *cells))

    def text(self) -> str:
        widths = [
            max(len(r[i]) for r in [("", *self.columns), *self.rows]) for i in range(len(self.columns) + 1)
        ]
        lines = ["", self.title]
        for name, *cells in [("", *self.columns), *self.rows]:
            aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"  {name:<{widths[0]}}  {'  '.join(aligned)}".rstrip())
        return "\n".join(lines)

    def markdown(self) -> str:
        lines = [f"| {' | '.join(cells)} |" for cells in [("", *self.columns), *self.rows]]
        lines.insert(1, f"|---{'|--:' * len(self.columns)}|")
        return "\n".join([f"## {self.title}", "", *lines, ""])


def verdict(figure: float, limit: float) -> str:
    return " ok" if figure <= limit else " EXCEEDED"


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


def operators(x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of every quantizer and cast on ``x``."""
    last, last_scale, second, second_scale = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3)
    turned = (last.t(), last_scale.transpose(0, 1))
    packed, packed_scale = ops.dynamic_mx_quant(x, dst_type=E2M1)
    hifloat8, e4m3 = ops.cast_hifloat8(x), ops.cast_e4m3(x)
    ends = torch.arange(1, 9) * len(x) // 8
    one = torch.tensor([0.5])

    def mx(**how) -> Callable[[], object]:
        return lambda: ops.dynamic_mx_quant(x, **{"dst_type": E4M3} | how)

    def anti(codes: Tensor, scale: Tensor, axis: int, dtype: torch.dtype, **how) -> Callable[[], object]:
        return lambda: ops.anti_mx_quant(codes, scale, axis=axis, dst_type=dtype, **how)

    def dynamic(code: int, mode: str, **how) -> Callable[[], object]:
        return lambda: ops.dynamic_quant(x, dst_type=code, quant_mode=mode, **how)

    def blocks(rows: int, code: int) -> Callable[[], object]:
        mode = "round" if code == HIF8 else "rint"
        return lambda: ops.dynamic_block_quant(x, dst_type=code, row_block_size=rows, round_mode=mode)

    return {
        "dynamic_mx_quant axis=-1": mx(),
        "dynamic_mx_quant axis=-2": mx(axis=-2),
        "dynamic_mx_quant axis=-1, scale_alg=1": mx(scale_alg=1),
        "dynamic_mx_quant axis=-1, E2M1": mx(dst_type=E2M1),
        "dynamic_mx_quant axis=-2, E2M1": mx(dst_type=E2M1, axis=-2),
        "dynamic_mx_quant axis=-1, E2M1, scale_alg=2": mx(dst_type=E2M1, scale_alg=2),
        "dynamic_mx_quant_with_dual_axis": lambda: ops.dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3),
        "dynamic_mx_quant_with_dual_axis, E2M1": lambda: ops.dynamic_mx_quant_with_dual_axis(
            x, dst_type=E2M1
        ),
        "dynamic_block_mx_quant": lambda: ops.dynamic_block_mx_quant(x, dst_type=E4M3),
        "dynamic_block_mx_quant, E2M1": lambda: ops.dynamic_block_mx_quant(x, dst_type=E2M1),
        "grouped_dynamic_mx_quant, 8 groups": lambda: ops.grouped_dynamic_mx_quant(x, ends, dst_type=E4M3),
        "anti_mx_quant axis=-1 to bf16": anti(last, last_scale, -1, torch.bfloat16),
        "anti_mx_quant axis=-2 to bf16": anti(second, second_scale, -2, torch.bfloat16),
        "anti_mx_quant axis=-1 to fp32": anti(last, last_scale, -1, torch.float32),
        "anti_mx_quant axis=-1, E2M1, to bf16": anti(packed, packed_scale, -1, torch.bfloat16, src_type=E2M1),
        "anti_mx_quant of a transposed view to bf16": anti(*turned, 0, torch.bfloat16),
        "anti_mx_quant of a transposed view to fp32": anti(*turned, 0, torch.float32),
        "dynamic_quant pertensor, HiFloat8": dynamic(HIF8, "pertensor"),
        "dynamic_quant pertensor, HiFloat8 to 15": dynamic(HIF8, "pertensor", dst_type_max=15.0),
        "dynamic_quant pertensor, E4M3": dynamic(E4M3, "pertensor"),
        "dynamic_quant pertoken, E4M3": dynamic(E4M3, "pertoken"),
        "dynamic_quant perchannel, E4M3": dynamic(E4M3, "perchannel"),
        "dynamic_quant pertoken, int8": dynamic(torch.int8, "pertoken"),
        "dynamic_block_quant 1x128, E4M3": blocks(1, E4M3),
        "dynamic_block_quant 128x128, E4M3": blocks(128, E4M3),
        "dynamic_block_quant 1x128, HiFloat8": blocks(1, HIF8),
        "quantize, E4M3": lambda: ops.quantize(x, one, None, E4M3),
        "quantize, HiFloat8": lambda: ops.quantize(x, one, None, HIF8),
        "cast_hifloat8": lambda: ops.cast_hifloat8(x),
        "cast_e4m3": lambda: ops.cast_e4m3(x),
        "cast_e2m1": lambda: ops.cast_e2m1(x),
        "decode_hifloat8 to bf16": lambda: ops.decode_hifloat8(hifloat8, torch.bfloat16),
        "decode_e4m3 to bf16": lambda: ops.decode_e4m3(e4m3, torch.bfloat16),
        "quant_dequant_mxfp4": lambda: ops.quant_dequant_mxfp4(x),
    }


def torchao_calls(x: Tensor) -> dict[str, Callable[[], object]]:
    """torchao's counterparts, where it has one."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    rceil = ScaleCalculationMode.RCEIL
    return {
        "dynamic_mx_quant axis=-1": lambda: to_mx(x, E4M3, 32),
        "dynamic_mx_quant axis=-1, scale_alg=1": lambda: to_mx(x, E4M3, 32, scaling_mode=rceil),
        "dynamic_mx_quant axis=-1, E2M1": lambda: to_mx(x, torch.float4_e2m1fn_x2, 32),
    }


class Reference(TorchDispatchMode):
    """Our operators by their PyTorch reference."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lowp":
            return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
        return func(*args, **(kwargs or {}))


def by_reference(run: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with Reference():
            return run()

    return call


def time_operators(rows: int, columns: int, rounds: int, options: argparse.Namespace) -> Table:
    x = torch.randn(rows, columns).bfloat16()
    copy = torch.empty_like(x)
    calls = operators(x)
    best = shortest({"copy": lambda: copy.copy_(x)} | calls, rounds)
    columns_of = {"ms": best, "x copy": {name: seconds / best["copy"] for name, seconds in best.items()}}
    slow_rounds = 2 if rows == 4096 else 20
    if options.reference:
        slow = shortest({name: by_reference(run) for name, run in calls.items()}, slow_rounds)
        columns_of["reference, x copy"] = {name: seconds / best["copy"] for name, seconds in slow.items()}
    if options.torchao:
        slow = shortest(torchao_calls(x), slow_rounds)
        columns_of["torchao, x copy"] = {name: seconds / best["copy"] for name, seconds in slow.items()}
    limits = LIMITS if rows == 4096 else {}
    if limits:
        columns_of["limit"] = limits
    table = Table(f"bf16 {rows} x {columns}, shortest of {rounds}, ratios to a copy", list(columns_of))
    for name in best:
        ratio, limit = best[name] / best["copy"], limits.get(name)
        cells = [f"{best[name] * 1e3:.3f}"]
        for column, figures in list(columns_of.items())[1:]:
            cell = f"{figures[name]:.2f}" if name in figures else ""
            cells.append(cell + verdict(ratio, limit) if column == "limit" and cell else cell)
        table.add(name, *cells)
    return table


def matmul_and_its_parts() -> tuple[Callable[[], object], Callable[[], object]]:
    """A small MX product, and what it consists of on a CPU: two decodings, a GEMM and a rounding."""
    (a, a_scale), (b, b_scale) = (
        ops.dynamic_mx_quant(torch.randn(shape).bfloat16(), axis=axis, dst_type=E4M3)
        for shape, axis in (((8, 64), -1), ((64, 8), -2))
    )
    how = {"group_sizes": [1, 1, 32], "scale_dtype": 293, "pertoken_scale_dtype": 293}

    def whole() -> object:
        return ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.bfloat16, **how)

    def parts() -> object:
        left = ops.anti_mx_quant(a, a_scale, axis=-1, dst_type=torch.float32)
        right = ops.anti_mx_quant(b, b_scale, axis=-2, dst_type=torch.float32)
        return (left @ right).bfloat16()

    return whole, parts


def time_calls() -> Table:
    """What a call costs besides the work: operators on 8 rows of 64 elements, in microseconds."""
    calls = operators(torch.randn(8, 64).bfloat16())
    calls["quant_matmul, MX E4M3"], calls["its parts"] = matmul_and_its_parts()
    best = shortest({name: lambda run=run: [run() for _ in range(100)] for name, run in calls.items()}, 30)
    product = best.pop("quant_matmul, MX E4M3")
    best["quant_matmul, MX E4M3, beyond its two decodings and GEMM"] = product - best.pop("its parts")
    table = Table("one call on bf16 8 x 64, shortest of 30 times 100", ["us", "limit"])
    for name, seconds in best.items():
        us = seconds / 100 * 1e6
        table.add(name, f"{us:.1f}", f"{CALL_LIMIT:.0f}{verdict(us, CALL_LIMIT)}")
    return table


def time_matmuls(size: int, rounds: int) -> Table:
    """Products of square matrices in each mode; the bf16 is in fp32 where torch has no better."""
    x, w = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    bf16, mx = torch.bfloat16, {"group_sizes": [1, 1, 32], "scale_dtype": 293, "pertoken_scale_dtype": 293}

    def product(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], output_dtype: torch.dtype = bf16, **how
    ) -> Callable[[], object]:
        return lambda: ops.quant_matmul(
            a[0], b[0], b[1], pertoken_scale=a[1], output_dtype=output_dtype, **how
        )

    a, b = ops.dynamic_mx_quant(x, dst_type=E4M3), ops.dynamic_mx_quant(w, axis=-2, dst_type=E4M3)
    a4, b4 = ops.dynamic_mx_quant(x, dst_type=E2M1), ops.dynamic_mx_quant(w, axis=-2, dst_type=E2M1)
    fp4, hif8 = {"x1_dtype": E2M1, "x2_dtype": E2M1}, {"x1_dtype": HIF8, "x2_dtype": HIF8}
    tensorwise = [
        ops.dynamic_quant(t, dst_type=HIF8, quant_mode="pertensor", dst_type_max=15.0) for t in (x, w)
    ]
    token, channel = (
        ops.dynamic_quant(t, dst_type=E4M3, quant_mode=mode)
        for t, mode in ((x, "pertoken"), (w, "perchannel"))
    )
    tiles, squares = (
        ops.dynamic_block_quant(t, dst_type=E4M3, row_block_size=rows) for t, rows in ((x, 1), (w, 128))
    )
    total = torch.zeros(size, size)
    group_list = torch.arange(1, 9) * size // 8
    weights = [t.expand(8, *t.shape).contiguous() for t in b]
    totals = torch.zeros(8, size, size)
    c = ops.grouped_dynamic_mx_quant(x, group_list.int(), dst_type=E4M3)
    added = {"x1_scale": a[1], "x1_scale_dtype": 293, "x2_scale_dtype": 293, "group_sizes": [1, 1, 32]}
    baseline = (lambda: x @ w) if gemm.bf16_gemm_is_native() else (lambda: (x.float() @ w.float()).bfloat16())
    best = shortest(
        {
            "bf16": baseline,
            "quant_matmul, MX E4M3": product(a, b, **mx),
            "quant_matmul, MX E4M3 to fp32": product(a, b, torch.float32, **mx),
            "quant_matmul, MX E2M1": product(a4, b4, **mx, **fp4),
            "quant_matmul, HiFloat8 pertensor": product(*tensorwise, **hif8),
            "quant_matmul, E4M3 pertoken x perchannel": product(token, channel),
            "quant_matmul, E4M3 1x128 x 128x128": product(tiles, squares, group_sizes=[1, 128, 128]),
            "grouped_matmul, MX E4M3, 8 groups": lambda: ops.grouped_matmul(
                [a[0]],
                weights[:1],
                scale=weights[1:],
                per_token_scale=[a[1]],
                group_list=group_list,
                split_item=3,
                group_type=0,
                output_dtype=bf16,
            ),
            "add_quant_matmul_, MX E4M3": lambda: ops.add_quant_matmul_(total, a[0], *b, **added),
            "add_quant_gmm_, MX E4M3, 8 groups": lambda: ops.add_quant_gmm_(
                totals, c[0].mT, c[0], c[1], group_list, x1_scale=c[1].transpose(0, 1)
            ),
        },
        rounds,
    )
    table = Table(
        f"matmuls, {size} x {size} x {size}, shortest of {rounds}, ratios to bf16", ["ms", "x bf16"]
    )
    for name, seconds in best.items():
        table.add(name, f"{seconds * 1e3:.2f}", f"{seconds / best['bf16']:.2f}")
    return table


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


def limited(title: str, unit: str, figures: dict[str, tuple[str, float]], limits: dict[str, float]) -> Table:
    """A table of ratios, some of which have a limit."""
    table = Table(title, [unit, "ratio", "limit"])
    for name, (figure, ratio) in figures.items():
        limit = limits.get(name)
        table.add(
            name, figure, f"{ratio:.3f}", "" if limit is None else f"{limit:.2f}{verdict(ratio, limit)}"
        )
    return table


def over_bf16(title: str, best: dict[str, float], limit: float | None) -> Table:
    figures = {name: (f"{seconds * 1e3:.2f}", seconds / best["bf16"]) for name, seconds in best.items()}
    limits = {} if limit is None else {name: limit for name in best if name != "bf16"}
    return limited(title, "ms", figures, limits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, matmuls at 1024 only, no GPT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="also time the PyTorch reference (slow)")
    parser.add_argument("--torchao", action="store_true", help="also time torchao's to_mx (slow)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    levels = ", ".join(kernels.supported_levels()) or "none: the PyTorch reference serves"
    machine = (
        f"{cpu_model()}; {options.threads} threads; torch {torch.__version__}; kernel levels here: {levels}"
    )
    print(machine)
    tables: list[Table] = []

    def show(table: Table) -> None:
        print(table.text(), flush=True)
        tables.append(table)

    for rows, columns in ((4096, 4096), (64, 1024)):
        rounds = (3 if options.quick else 40) if rows == 4096 else (50 if options.quick else 500)
        show(time_operators(rows, columns, rounds, options))
    show(time_calls())
    size = 1024 if options.quick else 4096
    show(time_matmuls(size, 3))

    limit = LINEAR_LIMIT if size == 4096 else None
    title = f"linear forward + backward, T=K=N={size}, shortest of 3, ratios to bf16"
    show(over_bf16(title, shortest(linears(size), 3), limit))
    if not gemm.bf16_gemm_is_native():
        bf16, fp32 = torch_bf16_against_fp32(512)
        print(
            "  This CPU has no bf16 instructions, so the bf16 linear above multiplies in fp32: torch's own\n"
            f"  bf16 matmul of 512 x 512 takes {bf16 * 1e3:.2f} ms, its fp32 one {fp32 * 1e3:.2f} ms."
        )
    kept = {
        name: (f"{ratio * 2 * size * size / 2**20:.1f}", ratio) for name, ratio in bytes_kept(size).items()
    }
    title = f"kept for backward by this linear, Parameters not counted, ratios to bf16, T=K=N={size}"
    show(limited(title, "MiB", kept, {"mxfp8, deferred": SAVED_LIMIT}))
    if not options.quick:
        title = "GPT training step (hidden 1024, 4 layers, sequence 1024), shortest of 8, ratios to bf16"
        show(over_bf16(title, gpt_steps(), GPT_LIMIT))

    if options.markdown:
        heading = (
            "# Performance\n\nWritten by `scripts/bench_ops.py`, which says what is measured and how, on:"
        )
        sections = [heading, machine, *(table.markdown() for table in tables)]
        options.markdown.write_text("\n\n".join(sections).rstrip() + "\n")


if __name__ == "__main__":
    main()
