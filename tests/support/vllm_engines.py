"""vLLM's engine with and without the plugin, in processes of an environment that has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lexshard.loadtest.bench.peers.beside_vllm import VllmProcess, vllm_environment
from tests.support.paths import ROOT

# Made by `make vllm`, or named by this variable.
VARIABLE = "LEXSHARD_VLLM_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".vllm" / "bin" / "python"))
MISSING = f"no environment with vLLM: `make vllm` makes one, {VARIABLE} names another"
DEMO = ROOT / "models" / "lexshard-demo"


class PluginEngine:
    """An engine that answers batches of requests; the plugin is on or off."""

    def __init__(self, process: VllmProcess) -> None:
        self._process = process

    def answers(
        self, prompts: Sequence[Sequence[int]], parameters: Any
    ) -> tuple[list[list[int]], list[Any]]:
        """The tokens of every prompt, and its log-probabilities: per token [id, value, rank]. The
        ``parameters`` are those of vLLM's ``SamplingParams``, of each prompt or of all."""
        asked = {"prompts": [list(each) for each in prompts], "parameters": parameters}
        found = self._process.ask(asked)
        return found["token_ids"], found["logprobs"]

    def tokens(self, prompts: Sequence[Sequence[int]], parameters: Any) -> list[list[int]]:
        """As `answers`, the tokens alone."""
        return self.answers(prompts, parameters)[0]

    def counts(self) -> str:
        """What the plugin has decided so far; of ranks that differ, what each has."""
        return str(self._process.ask({"counts": True})["counts"])


@contextmanager
def plugin_engine(*, plugin: bool, **arguments: Any) -> Iterator[PluginEngine]:
    """An engine of the demo with these ``arguments`` of vLLM's ``LLM``, in float32 unless they say
    otherwise."""
    cores, ranks = sorted(os.sched_getaffinity(0)), arguments.get("tensor_parallel_size", 1)
    own = [str(cores[rank % len(cores)]) for rank in range(ranks)]
    environment = {
        **vllm_environment(PYTHON, cores[:1], 1),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(own),
        "VLLM_PLUGINS": "lexshard" if plugin else "",
    }
    load = {
        "model": str(DEMO),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "generation_config": "vllm",
        **arguments,
    }
    with VllmProcess(PYTHON, "vllm_steps.py", environment) as process:
        process.ask({"load": load})
        yield PluginEngine(process)
