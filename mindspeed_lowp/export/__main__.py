"""Export a trained checkpoint for inference: packed MXFP4 or MXFP8 weights that compressed-tensors reads.

    python -m mindspeed_lowp.export --format mxfp4-pack-quantized --load CHECKPOINT --output FOLDER

CHECKPOINT is a Hugging Face folder (config.json, *.safetensors) or a checkpoint folder of Megatron.
Embeddings, the output layer, norms and routers stay as they are. See docs/export.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_lowp.export import (
    MXFP4,
    MXFP8,
    Checkpoint,
    ExportError,
    Packing,
    export_checkpoint,
    open_checkpoint,
)
from mindspeed_lowp.export.checkpoint import Training
from mindspeed_lowp.export.selection import quantized_names
from mindspeed_lowp.formats import E2M1, MX_BLOCK


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    try:
        _export(arguments)
    except ExportError as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_lowp.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", required=True, choices=(MXFP4.name, MXFP8.name))
    parser.add_argument(
        "--load",
        required=True,
        type=Path,
        metavar="CHECKPOINT",
        help="Hugging Face folder or Megatron checkpoint",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument(
        "--force", action="store_true", help="replace what is in FOLDER, once the export is whole"
    )
    parser.add_argument(
        "--skip-names",
        nargs="+",
        default=[],
        metavar="NAME",
        help="keep as they are, besides those, layers whose dotted name contains NAME",
    )
    training = parser.add_argument_group("how the model was trained")
    training.add_argument(
        "--scale-mode",
        choices=MXFP4.scale_modes,
        help="rule of the scale (default: what the checkpoint tells, else round for MXFP4, floor for MXFP8)",
    )
    training.add_argument(
        "--scale-factor",
        type=float,
        metavar="X",
        help=f"of MXFP4: divisor of the largest magnitude (default: {E2M1.max})",
    )
    training.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help=f"of MXFP4: elements that share a scale (default: {MX_BLOCK})",
    )
    return parser


def _export(arguments: argparse.Namespace) -> None:
    _check_installed()
    _check_folders(arguments.load, arguments.output)
    checkpoint = open_checkpoint(arguments.load)
    packing = _packing(arguments, checkpoint)
    skip_names = [*arguments.skip_names, *checkpoint.training.skip_names]
    quantized = quantized_names(checkpoint.parameters, skip_names, checkpoint.training.experts_only)

    from tqdm import tqdm

    for note in checkpoint.notes:
        print(note)
    total = sum(parameter.bytes for parameter in checkpoint.parameters)
    with tqdm(total=total, unit="B", unit_scale=True, desc=packing.name, disable=None) as bar:
        report = export_checkpoint(
            checkpoint, arguments.output, packing, quantized, arguments.force, progress=bar.update
        )
    print(
        f"{arguments.output}: {len(report.quantized)} weights in {packing.name},"
        f" {_size(report.bytes_read)} became {_size(report.bytes_written)}"
    )
    print(f"Kept in high precision, besides norms: {', '.join(_without_numbers(report.kept)) or 'none'}")
    if checkpoint.left_out:
        print(f"Not copied: {', '.join(checkpoint.left_out)}")


def _packing(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Packing:
    training = checkpoint.training
    options = {name: getattr(arguments, name) for name in ("scale_mode", "scale_factor", "block_size")}
    if training.scheme:
        print(f"The checkpoint was trained with --qat-scheme {training.scheme}")
        if arguments.format.split("-")[0] in training.scheme.split("-"):
            options["scale_mode"] = options["scale_mode"] or _scale_mode(training)
        else:
            print(
                f"warning: with --format {arguments.format} its weights become others than it computed with"
            )
    options = {name: value for name, value in options.items() if value is not None}
    packing = {MXFP4.name: MXFP4, MXFP8.name: MXFP8}[arguments.format]
    for name in options:
        if name not in packing.__dataclass_fields__:
            flag = "--" + name.replace("_", "-")
            raise ExportError(f"{flag} is for {MXFP4.name}; leave it out with --format {arguments.format}")
    return packing(**options)


def _scale_mode(training: Training) -> str | None:
    if training.by_mindspeed:
        raise ExportError(
            "--scale-mode is needed: MindSpeed trained this checkpoint, which does not say by which rule its"
            " scales were made (MindSpeed's own schemes: floor for MXFP4, ceil for MXFP8)"
        )
    return training.scale_mode


def _check_installed() -> None:
    try:
        import compressed_tensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise ExportError(f"the export needs {error.name}: pip install 'mindspeed-lowp[export]'") from error


def _check_folders(load: Path, output: Path) -> None:
    source, target = load.resolve(), output.resolve()
    if target == source or target in source.parents:
        raise ExportError(
            f"--output {output}: holds the checkpoint itself (--load {load}); give another folder"
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _without_numbers(names: list[str]) -> list[str]:
    """Each kind of layer once: `model.layers.*.mlp.router`."""
    parts = (["*" if part.isdigit() else part for part in name.split(".")] for name in names)
    return list(dict.fromkeys(".".join(part) for part in parts))


if __name__ == "__main__":
    main()
