"""Our server and vLLM's, asked by vLLM's own load client.

    python -m lexshard.loadtest.bench.serve_path.beside_vllm --vllm-python PATH [--rounds 3]

The servers take turns, each for itself on all cores with the client: started, warmed by the client,
measured at every number of streams, stopped. Random prompts, greedy, end of sequence ignored, no
prefix caching, fp32, one thread for vLLM's model and ours as it chooses.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lexshard.cluster.ports import free_port
from lexshard.loadtest.bench.machine import describe_machine, installed_versions
from lexshard.loadtest.bench.record import Measure, Report

NAME = "measured-model"
PROMPTS = {1: 24, 8: 96, 32: 256}  # by streams
START_SECONDS = 300.0
# As the client names them.
MEASURES = {
    "output_throughput": Measure("output tokens/s", "tokens/s", higher_is_better=True),
    "median_ttft_ms": Measure("TTFT median", "ms", higher_is_better=False),
    "median_tpot_ms": Measure("TPOT median", "ms", higher_is_better=False),
    "p99_itl_ms": Measure("ITL p99", "ms", higher_is_better=False),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A server by the command that starts it, to which the port is added."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    model, programs = str(arguments.model), arguments.vllm_python.parent
    ours = (sys.executable, "-m", "lexshard.serve_app.cli", "serve", "--model", model)
    theirs = (str(programs / "vllm"), "serve", model, "--max-model-len", "512")
    both = ("--served-model-name", NAME, "--dtype", "float32", "--port")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    return [
        Contender("lexshard", (*ours, *both), {}),
        Contender("vllm", (*theirs, "--no-enable-prefix-caching", *both), settings),
    ]


@contextmanager
def running(contender: Contender) -> Iterator[str]:
    """Its address, as soon as it is healthy.

    Raises:
        RuntimeError: it ended, or was not healthy in time; with the last that it said.
    """
    port = free_port()
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*contender.command, str(port)],
                env=_environment(of_vllm=contender.name == "vllm") | contender.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{contender.name} does not serve:\n{said}")
                time.sleep(0.5)
            time.sleep(2)  # what else it does after its start
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _environment(*, of_vllm: bool) -> dict[str, str]:
    """This process's own, but for what would show vLLM our packages."""
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH") if of_vllm else ()
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HF_HUB_OFFLINE": "1"}


def ask(arguments: argparse.Namespace, url: str, streams: int, folder: Path) -> dict[str, Any]:
    """What vLLM's client measured.

    Raises:
        RuntimeError: it failed, or a request did.
    """
    client = [str(arguments.vllm_python.parent / "vllm"), "bench", "serve", "--backend", "openai"]
    client += ["--base-url", url, "--endpoint", "/v1/completions", "--model", NAME]
    client += ["--tokenizer", str(arguments.model), "--dataset-name", "random", "--seed", "3"]
    client += ["--random-input-len", "64", "--random-output-len", "64", "--ignore-eos"]
    client += ["--temperature", "0", "--num-warmups", "4", "--max-concurrency", str(streams)]
    client += ["--num-prompts", str(PROMPTS[streams]), "--percentile-metrics", "ttft,tpot,itl"]
    client += ["--metric-percentiles", "50,99", "--save-result", "--result-dir", str(folder)]
    client += ["--result-filename", "result.json"]
    environment = _environment(of_vllm=True)
    done = subprocess.run(client, env=environment, capture_output=True, text=True, check=False)
    path = folder / "result.json"
    if not path.exists():
        raise RuntimeError(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if result["completed"] != PROMPTS[streams]:
        raise RuntimeError(f"{result['completed']} of {PROMPTS[streams]} requests were answered")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="PATH")
    parser.add_argument("--model", type=Path, default=Path("models/lexshard-demo"), metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.model = arguments.model.resolve()
    sides = contenders(arguments)
    results: dict[int, dict[str, list[dict[str, Any]]]] = {
        streams: {side.name: [] for side in sides} for streams in PROMPTS
    }
    with TemporaryDirectory() as folder:
        for index in range(arguments.rounds):
            for side in sides if index % 2 == 0 else reversed(sides):
                print(f"round {index + 1} of {arguments.rounds}: {side.name}", file=sys.stderr)
                with running(side) as url:
                    for streams in PROMPTS:
                        told = ask(arguments, url, streams, Path(folder))
                        results[streams][side.name].append(told)
    command = shlex.join(
        ["python", "-m", "lexshard.loadtest.bench.serve_path.beside_vllm", *sys.argv[1:]]
    )
    report = Report(describe_machine(), installed_versions(), command, seed=3)
    for streams, by_side in results.items():
        for key, measure in MEASURES.items():
            raw = {name: [float(told[key]) for told in runs] for name, runs in by_side.items()}
            report.add({"streams": streams}, measure, raw, ours="lexshard")
    print(report.table())
    if arguments.json is not None:
        report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
