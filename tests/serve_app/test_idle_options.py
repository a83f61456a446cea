"""An option that would do nothing is refused; at its default it is no option that was given."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.preflight import check_effects
from lexshard.serve_app.start.readiness import StartupError
from tests.support.paths import ROOT

# What is given in vain, each beside nothing but the model and the last, and with what it is not.
IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cpus_per_body": 0.5}, {"reserve": True}),
    ({"cpus_per_shard": 2.0}, {"address": "auto"}),
    ({"cpus_per_sampler": 0.5}, {"replicas": 2}),
    ({"cpus_per_drafter": 0.5}, {"max_replicas": 2}),
    ({"gpus_per_body": 0.0}, {"reserve": True}),
    ({"gpus_per_shard": 0.5}, {"reserve": True}),
    ({"placement_seconds": 5}, {"address": "auto"}),
    ({"shard_assignment": "blocks-contiguous"}, {"shards": 2}),
    ({"shard_trace": "trace.jsonl"}, {"shards": 2}),
    ({"shard_seconds": 3}, {"shards": 2}),
    ({"shard_seconds": 3, "tensor_parallel": 1}, {"tensor_parallel": 2}),
    ({"sampler_placement": "ray"}, {"samplers": 1}),
    ({"tiers": ["int8"], "head": "dense"}, {"head": "certified"}),
    ({"index": "i", "head": "dense"}, {"head": "paper"}),
    ({"index": "i", "head": "dense"}, {"shards": 2, "shard_assignment": "clusters-semantic"}),
    ({"draft_tokens": 3}, {"draft": "ngram"}),
    ({"draft_length": "fixed"}, {"draft": "ngram"}),
    ({"verify": "greedy", "edge_sessions": 0}, {"draft": "ngram"}),
    ({"verify": "greedy", "edge_sessions": 0}, {"edge_sessions": 1}),
    ({"edge_resume_seconds": 3, "edge_sessions": 0}, {"edge_sessions": 1}),
    ({"sampler_threads": 2}, {"samplers": 1}),
    ({"playground_kills": True, "playground": False}, {"playground": True}),
    ({"playground_kills": True, "host": "0.0.0.0"}, {"playground": True}),
    ({"attention": "triton", "device": "cpu"}, {"device": "auto"}),
    ({"no_compile": True, "device": "cpu"}, {"device": "cuda"}),
    ({"gpu_memory_utilization": 0.5, "device": "cpu"}, {"device": "auto"}),
    ({"steps_at_once": 4, "device": "cuda"}, {"device": "auto"}),
    ({"steps_at_once": 4, "shards": 2}, {"shards": 1}),
    ({"routing": "load"}, {"replicas": 2}),
    ({"target_ongoing_requests": 4}, {"max_replicas": 2}),
]


@pytest.mark.parametrize(("given", "then"), IDLE)
def test_what_would_do_nothing_is_refused_until_it_does_something(
    given: dict[str, Any], then: dict[str, Any]
) -> None:
    with pytest.raises(StartupError) as refused:
        check_effects(ServeConfig(model="m", **given))
    flag = "--tier" if "tiers" in given else "--" + next(iter(given)).replace("_", "-")
    assert str(refused.value).startswith(f"{flag} ")
    check_effects(ServeConfig(model="m", **given | then))


def test_values_at_their_defaults_are_no_options_that_were_given() -> None:
    """As in a file that lists all."""
    everything = yaml.safe_load((ROOT / "docs" / "serve.example.yaml").read_text(encoding="utf-8"))
    check_effects(ServeConfig(**everything | {"head": "dense", "device": "cpu"}))
    check_effects(ServeConfig(model="m", playground=False, playground_kills=False))
