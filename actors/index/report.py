"""An index in words and numbers, from its metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lexshard.actors.index.metadata import NEEDS, ClusterReport, Metadata, TierReport


def describe(path: Path, metadata: Metadata) -> str:
    """The report that `lexshard index` prints."""
    weights, calibration = metadata.weights, metadata.calibration
    dense = weights.rows * weights.columns
    lines = [
        f"vocabulary index {path} ({_bytes(path.stat().st_size)})",
        f"  weights      {weights.rows:,} x {weights.columns:,} {weights.dtype}"
        f"{' with biases' if weights.bias else ''}, SHA-256 {weights.hash[:16]}...",
        f"  dense head   {_bytes(2 * dense)} in bfloat16, {_bytes(4 * dense)} in float32",
        f"  calibration  {calibration.positions} hidden states of {calibration.source}: "
        f"{calibration.prompts} prompts, {calibration.fitted} for the common direction, the others "
        "measure",
    ]
    if metadata.clusters is None:
        lines.append("  clusters     none")
    else:
        lines += _clusters(metadata.clusters)
    lines += _tiers(metadata)
    return "\n".join(lines)


def _clusters(report: ClusterReport) -> list[str]:
    rows = [
        [bound, *(f"{100 * by_need[need]:.1f}%" for need in NEEDS)]
        for bound, by_need in report.opened.items()
    ]
    return [
        f"  clusters     {report.count:,} {report.kind}, {report.fine_clusters} of them for "
        f"{report.fine_tokens} special and numeric tokens, {_bytes(report.stored_bytes)}",
        "",
        "rows in clusters that a bound cannot exclude",
        *_table(["bound", *NEEDS], rows),
    ]


def _tiers(metadata: Metadata) -> list[str]:
    if not metadata.tiers:
        return ["  tiers        none"]
    weights = metadata.weights
    dense = 2 * weights.rows * weights.columns
    rows = [_tier_row(name, report, weights.rows, dense) for name, report in metadata.tiers.items()]
    heads = [f"{what} {need}" for need in NEEDS for what in ("kept", "bytes")]
    return [
        "",
        "rows that a tier cannot exclude (screen, then low plane), and bytes per token relative to",
        "the dense head in bfloat16, at one hidden state per step",
        *_table(["tier", "stored", "screen", "bound", "error", *heads], rows),
        "",
        *(_decision(name, report, dense) for name, report in metadata.tiers.items()),
    ]


def _tier_row(name: str, report: TierReport, vocabulary: int, dense: int) -> list[str]:
    found = report.tightness
    cells = [
        name,
        _bytes(report.stored_bytes),
        f"{report.screened_bytes / dense:.3f}",
        f"{found.bound:.3f}",
        f"{found.error:.4f}",
    ]
    for need in NEEDS:
        kept = _share(found.kept[need], vocabulary)
        if found.refined is not None:
            kept += f", {_share(found.refined[need], vocabulary)}"
        cells += [kept, f"{found.bytes_read[need] / dense:.3f}"]
    return cells


def _decision(name: str, report: TierReport, dense: int) -> str:
    """Why the common direction was kept or left out."""
    if report.alternative is None:
        return f"{name}: no common direction"
    used = report.tightness.mean_bytes / dense
    other = report.alternative.mean_bytes / dense
    chosen, rejected = "with", "without"
    if not report.common_direction:
        chosen, rejected = rejected, chosen
    return (
        f"{name}: {chosen} the common direction, {used:.4f} of the dense bytes on average "
        f"({rejected}: {other:.4f})"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, all but the first flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]


def _share(rows: float, total: int) -> str:
    return f"{100 * rows / total:.3f}%"


def _bytes(count: float) -> str:
    unit = next(i for i in range(4) if count < 1024 ** (i + 1) or i == 3)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1024**unit:.1f} {'KMG'[unit - 1]}iB"
