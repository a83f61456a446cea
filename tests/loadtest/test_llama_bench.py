"""What llama.cpp's bench prints is read as it stands, and where it fails its words are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lexshard.loadtest.bench.peers.llama_cpp import LlamaBench, Speeds

TOLD = '{"n_kv_max": 112, "pl": 1, "speed_pp": 4748.5, "speed_tg": 697.25}'


def bench(folder: Path, script: str) -> LlamaBench:
    program = folder / "llama-batched-bench"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return LlamaBench(folder, folder / "model.gguf", threads=2)


def test_speeds_are_read_from_its_last_line(tmp_path: Path) -> None:
    found = bench(tmp_path, f"echo loading; echo '{TOLD}'").measure(1)
    assert found == Speeds(4748.5, 697.25)


def test_its_own_words_are_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        bench(tmp_path, "echo no such model >&2; exit 1").measure(1)
    with pytest.raises(ValueError, match="folder it was built in"):
        LlamaBench(tmp_path / "elsewhere", tmp_path, 1)
