"""The figures of the overview: what each shows, the file it is drawn from, the command of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lexshard.loadtest.report.plots import Points, bars, curves, ratios

Results = Mapping[str, Any]  # what --json wrote
Draw = Callable[[Results], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One part of the page. ``says`` is what to see in it. ``file`` is where ``command`` writes;
    without a command none does any more."""

    name: str
    title: str
    says: str
    file: str
    command: str
    draw: Draw


def median_of(report: Results, name: str, **case: Any) -> float | None:
    """The median of the one result of ``name`` whose case has all of that."""
    for each in report["results"]:
        if each["name"] == name and case.items() <= each["case"].items():
            return float(each["median"])
    return None


def values_of(report: Results, key: str) -> list[Any]:
    """What ``key`` of a case takes, in the order of the file."""
    found = (each["case"].get(key) for each in report["results"])
    return list(dict.fromkeys(each for each in found if each is not None))


def points(
    report: Results, names: Sequence[str], across: str, scale: float = 1.0, **case: Any
) -> Points:
    """A measure by what ``across`` of the case takes; names without one are left out."""
    found = {
        name: [
            (float(x), scale * y)
            for x in values_of(report, across)
            if (y := median_of(report, name, **{across: x}, **case)) is not None
        ]
        for name in names
    }
    return {name: each for name, each in found.items() if each}


def bytes_read(report: Results) -> Iterator[str]:
    rows = []
    for need in values_of(report, "need"):
        for batch in values_of(report, "batch"):
            case = {"need": need, "batch": batch, "measure": "bytes read"}
            ours = median_of(report, "certified", **case)
            whole = median_of(report, "own dense", **case)
            if ours is not None and whole is not None:
                rows.append((f"{need}, {batch} row{'s' * (batch > 1)}", 100 * ours / whole))
    yield bars("Read of the output weights in bfloat16, every token exact", "%", rows)


def head_times(report: Results) -> Iterator[str]:
    for need in values_of(report, "need"):
        names = ("certified", "own dense", "torch bf16", "torch fp32")
        found = points(report, names, "batch", need=need, measure="time")
        yield curves(f"Head of {_shape(report)}, {need}", "rows", "ms", found, powers=True)


def _shape(report: Results) -> str:
    return " x ".join(f"{each:,}" for key in ("V", "d") for each in values_of(report, key)[:1])


def cluster_bounds(report: Results) -> Iterator[str]:
    rows = []
    for each in report["results"]:
        case = each["case"]
        if case.get("bias tables") == "on" and "opened" in each:
            place = ", ".join(str(case[key]) for key in ("C", "k-means", "bounds"))
            rows.append((place, each["opened"]["greedy"]["median"]))
    yield bars("Opened by the bounds of clusters, greedy", "% of rows", rows[:12])


def samplers(report: Results) -> Iterator[str]:
    names = ("vllm", "offloaded", "certified candidates")
    for batch in values_of(report, "batch"):
        found = points(report, names, "V", scale=1e3, batch=batch, measure="time per row")
        title = f"A decision with every control, {batch} row{'s' * (batch > 1)}"
        yield curves(title, "vocabulary", "microseconds a row", found, powers=True)


def shortlists(report: Results) -> Iterator[str]:
    names = ("router", "router, fixed budget", "static list")
    for temperature in values_of(report, "temperature"):
        found: dict[str, list[tuple[float, float]]] = {}
        for name in names:
            for size in values_of(report, "size"):
                shares, kept = [], []
                for task in values_of(report, "task"):
                    case = {"task": task, "size": size, "temperature": temperature}
                    share = median_of(report, name, **case, measure="vocabulary looked at")
                    own = median_of(report, name, **case, measure="accepted guesses")
                    full = median_of(report, "full head", **case, measure="accepted guesses")
                    if share is not None and own is not None and full:
                        shares.append(share)
                        kept.append(100 * own / full)
                if kept:
                    place = sum(shares) / len(shares), sum(kept) / len(kept)
                    found.setdefault(name, []).append(place)
        title = f"Guesses that stand, temperature {temperature:g}"
        yield curves(title, "% of the vocabulary looked at", "% of the full head's", found)


def engines(report: Results) -> Iterator[str]:
    names = tuple(dict.fromkeys(each["name"] for each in report["results"]))
    model = str(report["results"][0]["case"]["model"]).removeprefix("models/")
    found: dict[str, list[tuple[float, float]]] = {}
    for setting in ("one process", "process pairs"):
        measured = points(report, names, "requests", measure="throughput", setting=setting)
        found |= {name: list(each) for name, each in measured.items() if name not in found}
    yield curves(f"Engine, {model}", "requests", "tokens/s", found, powers=True)
    beside = points(report, names, "requests", measure="decoding", setting="beside llama.cpp")
    if beside:
        yield curves(f"Decoding, {model}", "requests", "tokens/s", beside, powers=True)


def verifications(report: Results) -> Iterator[str]:
    for drafter in values_of(report, "drafter"):
        names = ("exact", "sigmoid -10:10", "transformers", "torch softmax")
        found = points(report, names, "batch", drafter=drafter, measure="time")
        title = f"Five guesses, V = 151,936, drafter {drafter}"
        yield curves(title, "sequences", "ms", found, powers=True)


def shards(report: Results) -> Iterator[str]:
    measure = "bytes per token and shard"
    found = points(report, ["shards"], "shards", V=131072, batch=1, need="greedy", measure=measure)
    yield curves("Exchanged by each shard, greedy", "shards", "bytes a token", found)


def starts(report: Results) -> Iterator[str]:
    rows = []
    for case in ("warm", "first", "after-kill"):
        for measure in ("first token", "stream goes on"):
            found = median_of(report, "lexshard", case=case, measure=measure)
            if found is not None:
                rows.append((f"{case}: {measure}", found))
    yield bars("Start", "seconds", rows)
    phases = [
        (str(each["case"]["phase"]).removeprefix("engine: ").partition(":")[0], each["median"])
        for each in report["results"]
        if each["case"].get("case") == "warm" and each["case"].get("measure") == "phase"
    ]
    yield bars("A warm start by phase", "seconds", phases)


def rests(report: Results) -> Iterator[str]:
    names = list(dict.fromkeys(each["name"] for each in report["results"]))
    for measure, unit in (("CPU", "% of a core"), ("PSS", "MiB")):
        rows = [
            (name, value)
            for name in names
            if (value := median_of(report, name, process="all", measure=measure)) is not None
        ]
        title = "Used at rest" if measure == "CPU" else "Memory of all processes"
        yield bars(title, unit, rows)


def recoveries(report: Results) -> Iterator[str]:
    rows = [
        (str(each["case"]), float(each["recovered"]))
        for each in report["rows"]
        if each["recovered"] is not None
    ]
    yield bars("Until requests are served again", "seconds", rows)


def uplinks(report: Results) -> Iterator[str]:
    rows = []
    for each in report["results"]:
        case = dict(each["case"])
        if case.pop("measure") == "uplink per token":
            place = (f"{key} {value}" for key, value in case.items())
            rows.append((", ".join([each["name"], *place]), each["median"]))
    yield bars("Sent by the device", "bits a token", rows)


def loads(report: Results) -> Iterator[str]:
    found = [
        (f"{each['against']}, {each['case']['rate']} requests/s", each["ratio"])
        for each in report["ratios"]
        if each["case"]["measure"] == "E2E median"
    ]
    yield ratios("How many times sooner a whole answer is there", found)


FIGURES = (
    Figure("bytes", "Bytes against exactness",
           "Every token is the dense head's; what differs is how much is read for it. Bounds of "
           "clusters, as published, open nearly all rows of a trained head (below).",
           "head.json", "lexshard bench head", bytes_read),
    Figure("clusters", "What bounds of clusters leave out",
           "On the demo's hidden states, with a budget of a quarter.",
           "head-paper.json", "", cluster_bounds),
    Figure("head", "The head, by rows",
           "Left and below is better.", "head.json", "lexshard bench head", head_times),
    Figure("sampler", "Decisions, by vocabulary",
           "One thread, all controls on.", "sampler-vocabularies.json",
           "lexshard bench sampler -V 32000,128256,262144 --controls all", samplers),
    Figure("shortlist", "Guesses, by shortlist",
           "Means over tasks: a router that knows the context against a static list.",
           "draft.json", "lexshard bench draft --data DIR", shortlists),
    Figure("verify", "Verification, by sequences",
           "Drafters that agree with the target, nearly, or not at all.",
           "verify.json", "lexshard bench verify -V 151936 --gamma 5 --batch 1,4,16",
           verifications),
    Figure("engine", "The engine beside others", "Without HTTP, one thread each.",
           "engine.json", "lexshard bench engine --vllm-python PATH", engines),
    Figure("engine-large", "A large vocabulary", "Random weights, V = 262,144.",
           "engine-large-vocabulary.json",
           "lexshard bench engine --shape large-vocabulary --vllm-python PATH", engines),
    Figure("engine-gemma3", "Gemma 3 270M's shape", "Random weights, V = 262,144, bfloat16.",
           "engine-gemma3.json", "lexshard bench engine --shape gemma3 --llama-bench DIR", engines),
    Figure("load", "Servers under the same load",
           "Poisson arrivals; servers take turns, all of them up.",
           "serve.json", "lexshard bench serve --against NAME=http://HOST:PORT", loads),
    Figure("shards", "Shards", "What a shard tells the others for each token.",
           "shards.json", "lexshard bench shards", shards),
    Figure("edge", "Over a thin link", "An edge drafts, a server verifies.",
           "edge.json", "lexshard bench edge", uplinks),
    Figure("start", "Start", "The first: no kernel is compiled yet.",
           "start.json", "lexshard bench start", starts),
    Figure("rest", "At rest", "Sixty seconds without a request.",
           "rest.json", "lexshard bench rest", rests),
    Figure("recovery", "After a kill",
           "Processes killed under load; streams go on with the same text.",
           "chaos.json", "lexshard chaos", recoveries),
)  # fmt: skip
