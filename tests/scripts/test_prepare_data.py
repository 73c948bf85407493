from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "tests").mkdir(parents=True)
    (folder / "b.py").write_bytes(b"second\xff")
    (folder / "a.py").write_bytes(b"first")
    (folder / "empty.py").write_bytes(b"")
    (folder / "c.txt").write_bytes(b"other suffix")
    (folder / "tests" / "t.py").write_bytes(b"a test")
    return folder


def test_documents_are_bytes_and_an_end_token(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "data" / "mine"
    run = prepare("--output", output, texts, texts / "c.txt", "--max-bytes", 15)
    assert run.returncode == 0, run.stderr
    first, advice = run.stdout.splitlines()
    assert first == f"{output}_text_document: 2 documents, 12 bytes of text"
    assert "--split 100,0,0" in advice
    assert run.stderr == ""
    tokens = np.fromfile(f"{output}_text_document.bin", dtype=np.uint16)
    assert tokens.tolist() == [*b"first", 256, *b"second\xff", 256]
    assert Path(f"{output}_text_document.idx").read_bytes().startswith(b"MMIDIDX")


def test_mistakes_are_named(tmp_path: Path, texts: Path) -> None:
    for arguments, message in (
        ([texts / "none"], f"{texts / 'none'}: no such file or folder"),
        ([texts, "--suffix", ".rs"], f"no *.rs file in {texts}; --suffix takes others"),
        ([texts, "--max-bytes", 3], "nothing to write: the files are empty, or --max-bytes 3 is less"),
    ):
        run = prepare("--output", tmp_path / "out", *arguments)
        assert run.returncode == 1
        assert run.stderr.startswith(message)
        assert len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))
