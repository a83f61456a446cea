"""Draws from hidden states of no model of ours, with numpy, numba and torch alone: tokens are those
of a dense head. ``python core_alone.py`` needs nothing of a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# torch brings what stands behind it.
CORE = {"lexshard", "numpy", "numba", "llvmlite", "torch"}
OF_TORCH = {
    *("filelock", "fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "networkx"),
    *("setuptools", "sympy", "torchgen", "triton", "typing_extensions"),
}


class CoreAlone(MetaPathFinder):
    """As if nothing else were installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        top = fullname.partition(".")[0]
        if top not in CORE | OF_TORCH | sys.stdlib_module_names and "editable" not in top:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main() -> None:
    sys.meta_path.insert(0, CoreAlone())
    import torch

    from lexshard.actors.decision.own import OwnDecisions
    from lexshard.actors.decision.sampler import Sampler, SamplerSettings
    from lexshard.actors.head.owned_rows import OwnedRows
    from lexshard.actors.head.sequence_head import SequenceHead
    from lexshard.actors.head.sharded.part import ShardPart, build_shard
    from lexshard.actors.messages import Request, SamplingParameters
    from lexshard.actors.states.row_table import RowNames
    from lexshard.actors.states.sequence_state import SequenceStates

    rows, size, width = 8, 4096, 64
    torch.manual_seed(1)
    weight = torch.randn(size, width).bfloat16()
    hidden = torch.randn(rows, width)
    asked = [
        SamplingParameters(),
        SamplingParameters(temperature=0.0),
        SamplingParameters(top_k=20, top_p=0.9),
        SamplingParameters(min_p=0.05, frequency_penalty=0.5),
    ]
    drawn = []
    for tiers in (("int4", "int8"), ()):
        part = ShardPart(
            weight, None, None, 1.0, OwnedRows.every(size), (0,), rows, tiers, {}, hidden.numpy()
        )
        states = SequenceStates(size, (0,), rows)
        head = SequenceHead(build_shard(part), states)
        decisions = OwnDecisions(Sampler(SamplerSettings(size, (0,)), states), states)
        for row in range(rows):
            states.open(row, Request(str(row), row, (5, 6), asked[row % len(asked)]))
        names = RowNames(tuple(range(rows)))
        found = decisions.submit(0, names, head.candidates(hidden, names)).result()
        drawn.append([each.token_id for each in found if each is not None])
    assert drawn[0] == drawn[1], drawn
    assert len(drawn[0]) == rows
    print("certified and dense draws are equal")


if __name__ == "__main__":
    main()
