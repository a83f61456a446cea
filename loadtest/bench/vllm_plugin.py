"""``lexshard bench vllm-plugin``: vLLM with the certified head beside vLLM as it is.

Both are loaded at once, in processes of their own on the same cores, and take turns run by run: the
same prompts, the same parameters, step by step.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.options.sampler import OFF, SETTINGS, Setting
from lexshard.loadtest.bench.peers.beside_vllm import VllmProcess, vllm_environment
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, percentile
from lexshard.loadtest.bench.synthetic.jobs import story_tokens
from lexshard.loadtest.bench.synthetic.random_model import DEMO, write_random_model

ON, WITHOUT = "vllm with lexshard", "vllm"
COUNTS = "the plugin's rows"  # in the report's versions
PROMPT_TOKENS = 32
TIME = Measure("time per step", "ms", higher_is_better=False)
SAME = Measure("greedy texts that are vllm's", "%", higher_is_better=True)
FIELDS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
NOTES = """\
time per step: of a run, the median of the steps in which every request got a token. In brackets:
the median of the ratios of neighbouring runs, above 1 where vLLM with lexshard is faster. Greedy
texts of bfloat16 may differ where vLLM's two best logits are equal after rounding.
Not measured: prompts, HTTP, GPUs."""


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_bench("vllm-plugin", arguments, measure, threads=arguments.threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on both; nothing of it can be wrong but the time."""
    with checkpoint(arguments) as model, ExitStack() as stack:
        processes = {
            name: stack.enter_context(started(arguments, model, report, plugins))
            for name, plugins in ((ON, "lexshard"), (WITHOUT, ""))
        }
        report.versions.update(processes[ON].versions)
        text = story_tokens(AutoTokenizer.from_pretrained(str(model), local_files_only=True))
        cases = list(itertools.product(arguments.requests, arguments.controls))
        for count, controls in tqdm(cases, unit="case", disable=None):
            measure_case(report, processes, arguments, text, count, SETTINGS[controls])
        report.notes += [f"lexshard: {report.versions[COUNTS]}", NOTES]
    return 0


def measure_case(
    report: Report,
    processes: Mapping[str, VllmProcess],
    arguments: argparse.Namespace,
    text: Sequence[int],
    count: int,
    setting: Setting,
) -> None:
    """``count`` requests of one ``setting``, run by run in turns. Raises RuntimeError where no
    plugin has certified a row: vLLM would be beside itself."""

    def take(process: VllmProcess) -> Callable[[int], dict[str, Any]]:
        def answer(turn: int) -> dict[str, Any]:
            seed = arguments.seed + turn + 1
            chance = random.Random(f"{seed}-{count}")
            starts = [chance.randrange(len(text) - PROMPT_TOKENS) for _ in range(count)]
            prompts = [text[start : start + PROMPT_TOKENS] for start in starts]
            parameters = parameters_of(setting, arguments.steps, seed)
            return process.ask({"prompts": prompts, "parameters": parameters})

        return answer

    found = in_turns({name: take(each) for name, each in processes.items()}, arguments.runs)
    report.versions[COUNTS] = counts = processes[ON].ask({"counts": True})["counts"]
    if counts.startswith(("None", "0 ")):
        place = f"the environment of {arguments.vllm_python}"
        raise RuntimeError(f"the plugin has certified nothing ({counts}): is it in {place}?")
    case: CaseLabels = {
        "model": str(arguments.model or arguments.shape),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "requests": count,
        "controls": setting.name,
    }
    times = {
        name: [1e3 * percentile(run["seconds"], 50) for run in of] for name, of in found.items()
    }
    report.add(case, TIME, times, ours=ON)
    if setting.greedy:
        same = [
            100.0 * sum(map(int, map(list.__eq__, ours["token_ids"], theirs["token_ids"]))) / count
            for ours, theirs in zip(found[ON], found[WITHOUT], strict=True)
        ]
        report.add(case, SAME, {ON: same})


def parameters_of(setting: Setting, tokens: int, seed: int) -> dict[str, Any]:
    """Of vLLM's ``SamplingParams`` those that differ from its defaults."""
    own = {name: getattr(setting, name) for name in FIELDS}
    off = {name: getattr(OFF, name) for name in FIELDS}
    different = {name: value for name, value in own.items() if value != off[name]}
    return {**different, "max_tokens": tokens, "seed": seed}


@contextmanager
def checkpoint(arguments: argparse.Namespace) -> Iterator[Path]:
    """The model's folder, which is written where it is a shape."""
    if arguments.model is not None or arguments.shape == "demo":
        yield arguments.model or DEMO
        return
    with TemporaryDirectory() as folder:
        write_random_model(Path(folder))
        yield Path(folder)


@contextmanager
def started(
    arguments: argparse.Namespace, model: Path, report: Report, plugins: str
) -> Iterator[VllmProcess]:
    """A process that has loaded ``model``, with these ``plugins``."""
    cores: Sequence[int] = report.machine["pinned_to_cores"]
    settings = vllm_environment(arguments.vllm_python, cores, arguments.threads)
    environment = {**settings, "VLLM_PLUGINS": plugins}
    with VllmProcess(arguments.vllm_python, "vllm_steps.py", environment) as process:
        load = {
            "model": str(model),
            "dtype": arguments.dtype,
            "max_model_len": PROMPT_TOKENS + arguments.steps,
            "max_num_seqs": max(arguments.requests),
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
        }
        process.ask({"load": load})
        yield process
