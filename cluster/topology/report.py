"""A plan as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lexshard.cluster.topology.plan import PlannedAssignment, TopologyPlan


def as_data(plan: TopologyPlan) -> dict[str, Any]:
    """The plan as plain data, with what is computed from it."""
    data = asdict(plan)
    for each, told in zip(plan.wire, data["wire"], strict=True):
        told |= {"per_shard": each.per_shard, "all_shards": each.all_shards, "saving": each.saving}
    return data


def describe(plan: TopologyPlan) -> str:
    """What `lexshard topology plan` prints."""
    model = plan.model
    lines = [
        f"{model.name} ({model.family}): {model.vocabulary_size:,} tokens x {model.hidden_size:,}, "
        f"{model.parameters:,} parameters of {model.weight_bytes} bytes, KV cache of "
        f"{plan.kv_tokens:,} tokens",
        "",
        f"assignment {plan.assignment.method}",
        *_assignment(plan.assignment),
        "",
        f"placement {plan.placement.strategy}, bundles "
        + json.dumps(plan.placement.bundles, separators=(", ", ": ")),
        *_roles(plan),
        "",
        "memory",
        *_devices(plan),
        "",
        f"bytes per token on the wire (beside {plan.hidden_state_bytes:,} of the hidden state, "
        "which goes to all shards at once)",
        *_wire(plan),
        "",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _assignment(assignment: PlannedAssignment) -> list[str]:
    work = assignment.work
    head = ["shard", "rows", *([] if work is None else ["of the trace"])]
    rows = [
        [str(number), f"{own:,}", *([] if work is None else [f"{work[number]:.1%}"])]
        for number, own in enumerate(assignment.rows)
    ]
    even = [f"{assignment.row_balance:.3f}"]
    if assignment.work_balance is not None:
        even.append(f"{assignment.work_balance:.3f}")
    return _table(head, [*rows, ["largest / mean", *even]])


def _roles(plan: TopologyPlan) -> list[str]:
    rows = []
    for each in plan.placement.placed:
        role = each.role
        where = plan.nodes[each.node].name + ("" if each.gpu is None else f", GPU {each.gpu}")
        parts = ", ".join(f"{name} {_bytes(count)}" for name, count in role.parts)
        rows.append([role.name, where, f"{role.cpus:g}", f"{role.gpus:g}", _bytes(role.bytes)])
        rows[-1].append(parts)
    return _table(["role", "on", "CPUs", "GPUs", "memory", "of which"], rows, left=(0, 1, 5))


def _devices(plan: TopologyPlan) -> list[str]:
    rows = [
        [device.name, _bytes(device.used), _bytes(device.total), ", ".join(device.roles) or "-"]
        for device in plan.devices
    ]
    return _table(["device", "used", "of", "by"], rows, left=(0, 3))


def _wire(plan: TopologyPlan) -> list[str]:
    head = ["need", "thresholds", "masses", "candidates", "certificate", "per shard", "all shards"]
    rows = [
        [
            each.need,
            *(
                f"{count:,}"
                for count in (
                    each.thresholds,
                    each.masses,
                    each.candidates,
                    each.certificates,
                    each.per_shard,
                    each.all_shards,
                    each.full_logits,
                )
            ),
            f"{each.saving:.1f}x",
        ]
        for each in plan.wire
    ]
    return _table([*head, "full logits", "fewer"], rows)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    """Columns as wide as their widest cell; those in ``left`` begin flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        (
            "  "
            + "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in (head, *rows)
    ]


def _bytes(count: float) -> str:
    unit = next(i for i in range(4) if count < 1024 ** (i + 1) or i == 3)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1024**unit:.1f} {'KMG'[unit - 1]}iB"
