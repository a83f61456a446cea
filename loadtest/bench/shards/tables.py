"""The tables that ``lexshard bench shards`` prints: what was measured, and the model."""

from __future__ import annotations

from collections.abc import Sequence

from lexshard.actors.collective import Operation
from lexshard.loadtest.bench.record import format_number, format_table, percentile
from lexshard.loadtest.bench.shards.case import ShardCase
from lexshard.loadtest.bench.shards.model import StepModel
from lexshard.loadtest.bench.shards.published import Link

MODELLED = (1, 2, 4, 8, 16, 32, 64)
_OPERATIONS: tuple[Operation, ...] = ("message", "hidden", "maximum", "gather")


def step_table(cases: Sequence[ShardCase], vocabulary: int, cores: int) -> str:
    """A line per case. A wall time that had to share cores has a star."""
    headers = ["shards", "batch", "need", "step ms", "compute", "wait", "exchange", "rest"]
    headers += ["own cores", "bytes", "of logits", "guarantee", "wrong"]
    rows = []
    for case in cases:
        shared = "*" if case.shards > cores else ""
        between = ["", "", ""]
        sent = ["", ""]
        if case.others:
            between = [
                format_number(each)
                for each in (
                    case.wait,
                    percentile(case.exchange, 50),
                    percentile(case.packing, 50),
                )
            ]
            sent = [
                f"{case.bytes_per_token:,.0f}",
                f"{100 * case.bytes_per_token / (4 * vocabulary):.2f}%",
            ]
        rows.append(
            [
                str(case.shards),
                str(case.batch),
                case.need,
                format_number(percentile(case.step, 50)) + shared,
                format_number(percentile(case.compute, 50)),
                *between,
                format_number(case.own_cores),
                *sent,
                " ".join(name for name, _ in case.guarantees.most_common()),
                str(case.wrong),
            ]
        )
    return format_table(headers, rows)


def operation_table(cases: Sequence[ShardCase]) -> str:
    """Microseconds of each collective operation at the root, where shards do not compute."""
    rows = []
    for case in cases:
        if not case.others:
            continue
        calls = [case.operation.get(name) for name in _OPERATIONS]
        rows.append(
            [
                str(case.shards),
                str(case.batch),
                case.need,
                *("" if each is None else f"{percentile(each, 50):.0f}" for each in calls),
                f"{1e3 * percentile(case.exchange, 50):.0f}",
                str(case.hops),
                f"{percentile(case.step_bytes, 50) / case.others:,.0f}",
                f"{case.hidden_bytes / case.others:,.0f}",
            ]
        )
    headers = ["shards", "batch", "need", *_OPERATIONS, "all, us", "hops"]
    return format_table([*headers, "bytes per server", "and hidden"], rows)


def explanation(cases: Sequence[ShardCase], cores: int) -> str:
    """What the columns mean, and what they do not."""
    lines = [
        "Medians. step: all processes together. compute: screen, bounds and rescoring of the",
        "slowest shard, each timed alone in this process. exchange: the collective operations of",
        "processes that repeat what they said without computing, same messages. rest: packing,",
        "merging and certificates at the root of the same. wait: what operations took beyond the",
        "exchange while shards computed. own cores: compute + exchange + rest. bytes: per token",
        "and server, sent and received, hidden states apart; of logits: against 4 V bytes.",
    ]
    most = max(case.shards for case in cases)
    if most > cores:
        lines += [
            f"* {cores} cores are at hand: more processes than that run in turns. These wall times",
            "  are NOT those of a cluster, their wait is mostly for a core, and their exchange and",
            "  operations, too, shared cores. own cores is a sum, not something that was run.",
        ]
    return "\n".join(lines)


def describe_link(link: Link) -> str:
    """The terms of a link in one line."""
    terms = [f"{link.base:.3g} us a hop"]
    if link.per_level:
        terms.append(f"{link.per_level:.3g} us per level of the tree")
    if link.per_peer:
        terms.append(f"{link.per_peer:.3g} us per further server")
    return f"{link.name}: {' + '.join(terms)}, {link.bandwidth / 1e9:.3g} GB/s"


def model_table(models: Sequence[StepModel]) -> str:
    """A line per head and link: microseconds and speed-up by number of shards. MODELLED."""
    headers = ["MODEL: V", "d", "link", *(f"N={shards}" for shards in MODELLED)]
    rows = [
        [
            f"{each.head.vocabulary:,}",
            f"{each.head.columns:,}",
            each.link.name,
            *(f"{each.step(shards):.0f} ({each.speed_up(shards):.1f}x)" for shards in MODELLED),
            str(each.fastest()),
            str(each.worth_it()),
        ]
        for each in models
    ]
    return format_table([*headers, "fastest at N", "half of N at N"], rows)
