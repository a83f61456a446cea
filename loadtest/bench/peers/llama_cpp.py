"""llama.cpp's own ``llama-batched-bench`` beside our engine: prompts and decoding apart.

It computes logits and chooses no token; ours decides every one. Its model is a GGUF file that
`gguf.write_gguf` makes of the same checkpoint.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lexshard.loadtest.bench.engine_runs import DECODING
from lexshard.loadtest.bench.peers.own_engine import EngineRunner
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.jobs import Job

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
PROMPTS = Measure("prompts", "tokens/s", higher_is_better=True)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of all sequences together."""

    prompts: float
    decoding: float


class LlamaBench:
    """The program in ``folder``, on the model in ``file`` with so many threads."""

    name = "llama.cpp"

    def __init__(self, folder: Path, file: Path, threads: int) -> None:
        self._program = folder / "llama-batched-bench"
        if not self._program.is_file():
            raise ValueError(
                f"{folder} has no llama-batched-bench: give the folder it was built in"
            )
        self._file, self._threads = file, threads

    def measure(self, requests: int) -> Speeds:
        """Of ``requests`` sequences. Raises RuntimeError where the program fails."""
        sizes = {
            "-npp": PROMPT_TOKENS,
            "-ntg": OUTPUT_TOKENS,
            "-npl": requests,
            "-c": requests * (PROMPT_TOKENS + OUTPUT_TOKENS),
            "-t": self._threads,
            "-tb": self._threads,
        }
        command = [str(self._program), "-m", str(self._file), "--output-format", "jsonl"]
        for name, value in sizes.items():
            command += [name, str(value)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        if ended.returncode or not lines:
            raise RuntimeError(f"llama-batched-bench: {ended.stderr.strip()[-500:]}")
        told = json.loads(lines[-1])
        return Speeds(told["speed_pp"], told["speed_tg"])


def own_speeds(engine: EngineRunner, prompts: Sequence[tuple[int, ...]]) -> Speeds:
    """Ours: once to the first token, once to all; the difference is decoding."""
    first, all_of_them = (
        engine.run([Job(prompt, tokens) for prompt in prompts]).wall_seconds
        for tokens in (1, 1 + OUTPUT_TOKENS)
    )
    count = len(prompts)
    return Speeds(
        count * PROMPT_TOKENS / first, count * OUTPUT_TOKENS / max(all_of_them - first, 1e-9)
    )


def add_speeds(report: Report, labels: CaseLabels, found: Mapping[str, Sequence[Speeds]]) -> None:
    """Record what turns of ours and of llama.cpp gave."""
    for measured, value in ((PROMPTS, lambda s: s.prompts), (DECODING, lambda s: s.decoding)):
        raw = {name: [value(each) for each in speeds] for name, speeds in found.items()}
        report.add(labels, measured, raw, ours="lexshard")
