"""One digest of 500 seeded requests, however the engine is run.

    python -m lexshard.loadtest.token_digest --model models/lexshard-demo

The same requests (greedy, sampled, every control, log-probabilities, several choices, common
beginnings) go through engines that differ in all that must not matter: room for keys and values
(so that sequences are preempted), prefix cache, number of samplers, head. Every engine must give
the same digest; two versions of lexshard on one machine must, too. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.bench.synthetic.jobs import Tokenizer, story_tokens

REQUESTS = 500
AT_ONCE = 100  # requests that are submitted together
LONGEST = 256  # tokens of prompt and output
SHARED_TOKENS = 64  # of a beginning that several prompts share

KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8),
    SamplingParameters(temperature=1.3, top_k=40),
    SamplingParameters(temperature=0.9, min_p=0.05),
    SamplingParameters(temperature=0.8, top_p=0.9),
    SamplingParameters(temperature=0.8, top_k=50, top_p=0.95),
    SamplingParameters(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((5, 2.0), (17, -3.0)),
        bad_words=((11,), (12, 13)),
        min_tokens=6,
    ),
    SamplingParameters(temperature=0.0, repetition_penalty=1.3, frequency_penalty=-0.1),
    SamplingParameters(temperature=0.7, logprobs=3, prompt_logprobs=2),
    SamplingParameters(temperature=0.7, allowed_ids=tuple(range(300, 900))),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine that must give the same tokens as every other."""

    name: str
    changes: dict[str, Any]
    must_preempt: bool = False
    must_hit: bool = False


VARIANTS = (
    Variant("plain", {}, must_hit=True),
    Variant("no prefix cache, dense head", {"prefix_cache": False, "head": "dense"}),
    Variant("little room", {"kv_cache_bytes": 40}, must_preempt=True, must_hit=True),
    Variant("3 samplers", {"samplers": 3}),
    Variant("2 samplers, little room", {"samplers": 2, "kv_cache_bytes": 40}, must_preempt=True),
)


def seeded_requests(tokenizer: Tokenizer, count: int, seed: int) -> list[Request]:
    """``count`` requests: kinds in turn, prompts of real text of which a third share a beginning,
    one request in ten with three choices."""
    chance = random.Random(seed)
    text = story_tokens(tokenizer)
    requests: list[Request] = []
    for index in range(count):
        length = chance.randrange(1, 150)
        start = chance.randrange(SHARED_TOKENS, len(text) - length)
        beginning = text[:SHARED_TOKENS] if index % 3 == 0 else []
        prompt = (*beginning, *text[start : start + length])
        parameters = replace(
            KINDS[index % len(KINDS)],
            max_tokens=chance.randrange(1, 40),
            seed=chance.randrange(2**63),
            ignore_eos=index % 4 != 0,
        )
        for choice in range(3 if index % 10 == 7 else 1):
            requests.append(Request(f"digest-{index}", choice, prompt, parameters))
    return requests


def digest(completions: Sequence[Completion]) -> str:
    """SHA-256 of everything a client is told about them, to the last bit of every float."""
    whole = hashlib.sha256()
    for each in completions:
        told = (
            each.request_id,
            each.choice,
            each.token_ids,
            each.finish_reason,
            each.stop_reason,
            [_exactly(entry) for entry in each.logprobs],
            [_exactly(entry) for entry in each.prompt_logprobs or ()],
        )
        whole.update(json.dumps(told).encode())
    return whole.hexdigest()


def _exactly(entry: Any) -> Any:
    if entry is None:
        return None
    top = [(token, value.hex()) for token, value in entry.top]
    return entry.token_id, entry.logprob.hex(), entry.rank, top


def run(model: str, requests: Sequence[Request], variant: Variant) -> str:
    """The digest of ``requests`` on this variant's engine.

    Raises RuntimeError where the variant did not do what it is there for.
    """
    engine = _engine(model, variant)
    try:
        engine.warm_up()
        completions = []
        for first in range(0, len(requests), AT_ONCE):
            completions.extend(run_to_completion(engine, requests[first : first + AT_ONCE]))
        statistics = engine.statistics()
        engine.check_idle()
    finally:
        engine.close()
    if variant.must_preempt and not statistics.preemptions:
        raise RuntimeError(f"{variant.name}: nothing was preempted")
    if variant.must_hit and not statistics.cached_prompt_tokens:
        raise RuntimeError(f"{variant.name}: the prefix cache was not hit")
    return digest(completions)


def _engine(model: str, variant: Variant) -> Engine:
    configuration = EngineConfiguration(
        model=model, dtype="float32", device="cpu", threads=1, max_model_len=LONGEST
    )
    changes = dict(variant.changes)
    if "kv_cache_bytes" in changes:  # given in blocks: how large one is, the model says
        information = Engine(configuration).information
        changes["kv_cache_bytes"] *= information.kv_bytes // information.kv_blocks
    return Engine(replace(configuration, **changes), start_sampler)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="models/lexshard-demo", metavar="DIR")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    requests = seeded_requests(tokenizer, arguments.requests, arguments.seed)
    digests = []
    for variant in VARIANTS:
        digests.append(run(arguments.model, requests, variant))
        print(f"{digests[-1]}  {variant.name}", flush=True)
    return 0 if len(set(digests)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
