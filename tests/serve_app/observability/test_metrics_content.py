"""What ``/metrics`` tells beyond counts: labels, histograms, vLLM's names; and who reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lexshard.actors.messages import STEP_SECONDS, EngineStatistics, SequenceTiming
from lexshard.cluster.engine.supervisor import NOTHING_HEARD
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.observability.server_metrics import ServerMetrics, merged_metrics
from tests.support.counting import metrics, record, values
from tests.support.exposition import exported_names, unlabelled
from tests.support.mock_engine import MockEngine, Script, ids
from tests.support.mock_server import Client, serve
from tests.support.paths import ROOT

MONITORING = ROOT / "k8s" / "overlays" / "monitoring"


def told_by(engine: MockEngine | None = None, **config: object) -> str:
    async def check(client: Client) -> str:
        await client.post("/v1/completions", json={"prompt": "abc", "stream": True})
        return (await client.get("/metrics")).text

    text: str = serve(check, engine, **config)
    return text


def test_every_sample_names_model_and_replica() -> None:
    text = told_by(served_model_name=["org/a", "b"])
    samples = [line for line in text.splitlines() if line[:1] != "#"]
    assert all('model="org/a"' in line and 'replica="' in line for line in samples)
    assert "lexshard_ready 1.0" in unlabelled(text).splitlines()


def test_a_request_is_observed_once_with_its_lengths_and_the_engines_times() -> None:
    one = metrics(None)
    answered = record()
    answered.note_timing(SequenceTiming(queued=0.03, prefill=0.07))
    answered.note_timing(SequenceTiming(queued=0.03, prefill=0.07, verify=0.01))
    answered.piece_times = [1.0, 1.003, 1.006, 1.106]
    one.observe(answered)
    told = values(one.text())
    assert told['lexshard_queue_seconds_bucket{le="0.02"}'] == 0
    assert told['lexshard_queue_seconds_bucket{le="0.05"}'] == 1
    assert told["lexshard_prefill_seconds_sum"] == pytest.approx(0.07)
    assert told['lexshard_request_prompt_tokens_bucket{le="4.0"}'] == 1
    assert told["lexshard_request_output_tokens_sum"] == 10
    assert told['lexshard_inter_token_latency_seconds_bucket{le="0.002"}'] == 0
    assert told['lexshard_inter_token_latency_seconds_bucket{le="0.005"}'] == 2
    assert told["lexshard_inter_token_latency_seconds_count"] == 3
    assert told["lexshard_inter_token_latency_seconds_sum"] == pytest.approx(0.106)


def test_a_stream_that_fails_after_its_first_token_is_counted_as_a_failure() -> None:
    told = told_by(MockEngine(script=lambda _: Script([ids("a")], error="broken")))
    counted = 'lexshard_http_requests_total{method="POST",path="/v1/completions",status="%d"} 1.0'
    assert counted % 500 in unlabelled(told)
    assert counted % 200 not in unlabelled(told)


def test_of_an_engine_that_has_not_spoken_nothing_is_told() -> None:
    """A zero would be taken for its restart, and all that it has counted for new."""
    text = told_by(MockEngine(statistics=NOTHING_HEARD), vllm_metrics=True)
    told = {"lexshard_ready", "vllm:time_to_first_token_seconds_count"}
    absent = {"lexshard_steps_total", "lexshard_waiting", "vllm:num_requests_waiting"}
    assert (told | absent) & exported_names(text) == told


def test_the_requests_of_each_process_are_told_by_all(tmp_path: Path) -> None:
    first, second = (metrics(Seats(tmp_path, 2)) for _ in range(2))
    first.observe(record())
    second.observe(record())
    second.observe(record(503))
    told = values(first.text())
    counted = [told[f'lexshard_api_process_requests_total{{process="{i}"}}'] for i in range(2)]
    assert counted == [1, 2]


def test_phases_of_steps_are_histograms_of_the_engines_own_counts() -> None:
    counts = [0.0] * (len(STEP_SECONDS) + 1)
    counts[3], counts[-1] = 5.0, 1.0  # up to a millisecond, and beyond every bound
    engine = MockEngine(statistics=EngineStatistics(step_seconds={"body": [*counts, 7.5]}))
    told = values(metrics(None, engine).text())
    assert told['lexshard_step_seconds_bucket{le="0.0005",phase="body"}'] == 0
    assert told['lexshard_step_seconds_bucket{le="0.001",phase="body"}'] == 5
    assert told['lexshard_step_seconds_bucket{le="+Inf",phase="body"}'] == 6
    assert told['lexshard_step_seconds_sum{phase="body"}'] == 7.5


def test_vllms_names_are_told_on_request_alone() -> None:
    engine = MockEngine(
        statistics=EngineStatistics(running=3, waiting=2, kv_blocks_used=16, kv_blocks_total=64)
    )
    assert "vllm:" not in told_by(engine=engine)
    lines = told_by(engine=engine, vllm_metrics=True).splitlines()
    for name, value in (
        ("vllm:num_requests_running", 3.0),
        ("vllm:num_requests_waiting", 2.0),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
        ("vllm:time_to_first_token_seconds_count", 1.0),
    ):
        assert f'{name}{{model_name="mock"}} {value}' in lines
    [cache] = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in cache
    assert 'num_gpu_blocks="64"' in cache


def test_replicas_tell_vllms_names_apart() -> None:
    """What they tell is one text."""
    texts = []
    for name in ("a", "b"):
        engine = MockEngine(statistics=EngineStatistics(running=3))
        told = ServerMetrics(
            engine,
            Admission(8, 100, None),
            (),
            model="m",
            replica=name,
            one_of_several=True,
            peer_names=True,
        )
        texts.append(told.text())
    lines = merged_metrics(texts).decode().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if line[0] != "#"]
    assert 'vllm:num_requests_running{model_name="m",replica="b"}' in samples
    assert len(samples) == len(set(samples))


def test_dashboard_and_rules_ask_for_nothing_that_is_not_exported() -> None:
    exported = exported_names(told_by(vllm_metrics=True))
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    [group] = rules["groups"]
    asked += [rule["expr"] for rule in group["rules"]]
    used = {name for each in asked for name in re.findall(r"\b(?:lexshard_|vllm:)\w+", each)}
    assert len(used) > 30
    assert used <= exported, used - exported
    described = " ".join(str(rule["annotations"]) for rule in group["rules"])
    for name in re.findall(r"\blexshard_\w+", described):
        assert name in exported or f"{name}_count" in exported, name


def test_panels_have_places_and_names_of_their_own() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({tuple(sorted(panel["gridPos"].items())) for panel in panels}) == len(panels)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here (Debian: apt-get install prometheus)")
    checked = subprocess.run(
        [program, "check", "rules", str(MONITORING / "alerts.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
