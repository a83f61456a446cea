"""``/metrics``: the engine's counters and those of the HTTP edge, as Prometheus text.

Whichever API process is asked, it answers for the server. prometheus_client's own way to that is
chosen for a whole process, by its environment before the first import, Ray's included; so what is
counted here stands in cells of ours, and prometheus_client writes it down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.observability.engine_metrics import EngineCollector, PeerNames
from lexshard.serve_app.observability.http_metrics import HttpCollector
from lexshard.serve_app.request_record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Labelled(Collector):
    """What ``collectors`` tell, every sample with ``labels``."""

    def __init__(self, collectors: Iterable[Collector], labels: Mapping[str, str]) -> None:
        self._collectors = tuple(collectors)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                metric.samples = [
                    sample._replace(labels={**self._labels, **sample.labels})
                    for sample in metric.samples
                ]
                yield metric


class ServerMetrics:
    """All that ``/metrics`` tells. ``seats`` None: of this process alone.

    ``model`` and ``replica`` label every sample where they are given. A replica is one engine with
    the API processes in front of it, which tell one sum. ``peer_names``: some metrics are told
    under vLLM's names, too; of replicas that are ``one_of_several`` they need that label.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        paths: Sequence[str],
        seats: Seats | None = None,
        *,
        model: str = "",
        replica: str = "",
        one_of_several: bool = False,
        peer_names: bool = False,
    ) -> None:
        self._http = HttpCollector(paths, seats)
        given = {"model": model, "replica": replica}
        labels = {name: value for name, value in given.items() if value}
        self._engine = EngineCollector(client, admission, self._http.counters)
        self._registry = CollectorRegistry()
        self._registry.register(_Labelled([self._engine, self._http], labels))
        if peer_names:
            named = {"model_name": model, **({"replica": replica} if one_of_several else {})}
            self._registry.register(_Labelled([PeerNames(client, self._http)], named))

    def observe(self, record: RequestRecord) -> None:
        """Counts a request that has been answered."""
        self._engine.note_restarts()
        self._http.observe(record)

    def text(self) -> bytes:
        return generate_latest(self._registry)


def merged_metrics(texts: Iterable[bytes]) -> bytes:
    """``texts`` in Prometheus' text format, whose samples differ in a label, as one: each metric
    with its description once and the samples of all, as the format wants it."""
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.decode().splitlines():
            if not line.startswith("# "):
                samples[name].append(line)
                continue
            name = line.split(" ", 3)[2]
            samples.setdefault(name, [])
            lines = described.setdefault(name, [])
            if line not in lines:
                lines.append(line)
    told = [line for name, lines in described.items() for line in (*lines, *samples[name])]
    return "".join(f"{line}\n" for line in told).encode()
