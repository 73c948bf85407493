"""Turn text files into a byte-level Megatron dataset: a document a file, a token a byte, an end token.

    python scripts/prepare_data.py --output data/stdlib
    python scripts/prepare_data.py --output data/mine notes.txt src/

The first takes the source text of Python's own standard library, and writes
data/stdlib_text_document.bin and data/stdlib_text_document.idx. Train on them with

    --data-path data/stdlib_text_document --tokenizer-type NullTokenizer --vocab-size 256

for which tokens 0 to 255 are the bytes and 256 ends a document.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
FEW_DOCUMENTS = 200  # so that a part of one percent holds some
# Tests of the standard library, and what was installed beside it.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="text files, or folders searched for --suffix (default: Python's standard library)",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="PREFIX",
        help="write PREFIX_text_document.bin and .idx",
    )
    parser.add_argument(
        "--suffix", default=".py", help="which files of a folder to take (default: %(default)s)"
    )
    parser.add_argument("--max-bytes", type=int, metavar="N", help="stop before the text exceeds N bytes")
    arguments = parser.parse_args()

    roots = arguments.inputs or [Path(sysconfig.get_paths()["stdlib"])]
    documents = read_documents(text_files(roots, arguments.suffix), arguments.max_bytes)
    write_dataset(arguments.output, documents)
    size = sum(map(len, documents))
    print(f"{arguments.output}_text_document: {len(documents)} documents, {size} bytes of text")
    if len(documents) < FEW_DOCUMENTS:
        print(
            "With so few documents train with --split 100,0,0 --eval-iters 0 --eval-interval 1000: Megatron "
            "splits by document, and stands still at a part without one."
        )


def text_files(roots: list[Path], suffix: str) -> list[Path]:
    """The files named by `roots`; folders stand for their files with `suffix`, in sorted order."""
    files = []
    for root in roots:
        if root.is_file():
            files.append(root)
        elif root.is_dir():
            for file in sorted(root.rglob(f"*{suffix}")):
                if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts[:-1]):
                    files.append(file)
        else:
            sys.exit(f"{root}: no such file or folder")
    if not files:
        sys.exit(f"no *{suffix} file in {', '.join(map(str, roots))}; --suffix takes others")
    return files


def read_documents(files: list[Path], max_bytes: int | None) -> list[bytes]:
    """The contents of the files, empty ones left out, until they would exceed `max_bytes` in all."""
    documents = []
    left = float("inf") if max_bytes is None else max_bytes
    for file in files:
        text = file.read_bytes()
        left -= len(text)
        if left < 0:
            break
        if text:
            documents.append(text)
    if not documents:
        sys.exit(f"nothing to write: the files are empty, or --max-bytes {max_bytes} is less than the first")
    return documents


def write_dataset(output: Path, documents: list[bytes]) -> None:
    """Write the documents as Megatron's indexed dataset."""
    # Imported late: it takes seconds, and a mistyped path should not wait for it. Megatron warns of
    # packages that only training could use.
    warnings.filterwarnings("ignore", "(Transformer Engine|Apex|absl.logging)", UserWarning)
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{output}_text_document"
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
    for text in documents:
        tokens = [*text, END_OF_DOCUMENT]
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(get_idx_path(prefix))


if __name__ == "__main__":
    main()
