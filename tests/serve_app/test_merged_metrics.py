"""What several replicas tell of themselves is one text to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lexshard.serve_app.observability.server_metrics import merged_metrics


def told_by(replica: str, requests: int, *, more: bool = False) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("requests", "How many", ["replica"], registry=registry)
    counter.labels(replica).inc(requests)
    seconds = Histogram("seconds", "How long", ["replica"], registry=registry)
    seconds.labels(replica).observe(0.1)
    if more:
        Counter("drafts", "Of one alone", ["replica"], registry=registry).labels(replica).inc()
    return generate_latest(registry)


def test_each_metric_is_described_once_and_has_the_samples_of_all() -> None:
    alone = [told_by("a", 1), told_by("b", 2, more=True)]
    families = list(text_string_to_metric_families(merged_metrics(alone).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert {"requests", "seconds", "drafts"} <= set(names)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for text in alone
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert found == expected


def test_one_replica_tells_what_it_would_tell_alone() -> None:
    alone = told_by("a", 1, more=True)
    assert merged_metrics([alone]) == alone
    assert merged_metrics([]) == b""
