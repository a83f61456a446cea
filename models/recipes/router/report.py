"""What a router file says about itself, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lexshard.actors.drafter.router.file import RouterFile


def describe(path: Path, router: RouterFile) -> str:
    """Clusters, training, and what each head is worth on the texts that were held out."""
    report = router.report
    sizes = report.cluster_sizes
    size, count = len(router.cluster_of), len(router.outer_bias) - len(router.always)
    full = report.accepted["full head"]
    return "\n".join(
        [
            f"{path}: {path.stat().st_size:,} bytes, for guesses at {report.target}",
            f"  vocabulary         {size:,} tokens: {report.hot_tokens:,} always looked at, the "
            f"others in {count} clusters of {sizes.least:.0f} to {sizes.most:.0f} (median "
            f"{sizes.median:.0f})",
            f"  trained on         {report.prompts:,} prompts, {report.written_tokens:,} tokens of "
            f"the target at temperatures {_numbers(report.temperatures)}; seed {report.seed}",
            f"  loss               {report.losses[0]:.3f} to {report.losses[-1]:.3f} in "
            f"{report.epochs} epochs",
            f"  clusters per step  {_numbers(router.budgets.tolist())}",
            f"  recall per step    {_numbers([f'{value:.3f}' for value in report.recall])}",
            *(
                f"  {name:<22} {accepted:.3f} guesses stand ({accepted / full:.3f} of the full "
                f"head's), {100 * report.share[name]:.1f}% of the vocabulary"
                for name, accepted in report.accepted.items()
            ),
        ]
    )


def _numbers(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
