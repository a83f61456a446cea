"""Draws from hidden states of no model of ours, with numpy, numba and torch alone: the best
token is torch's. ``python core_alone.py`` needs nothing of a checkout.
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

    from lexshard.actors.messages import Request, SamplingParameters
    from lexshard.actors.standalone.drawing_head import DrawingHead
    from lexshard.actors.states.row_table import RowNames

    size, width = 4096, 64
    torch.manual_seed(1)
    weight, hidden = torch.randn(size, width).bfloat16(), torch.randn(8, width)
    head = DrawingHead(weight, None, None, 1.0, size)
    logits = hidden @ weight.float().T

    def drawn(parameters: SamplingParameters) -> list[int]:
        for row in range(len(hidden)):
            head.states.open(row, Request(str(row), row, (5, 6), parameters))
        names = RowNames(tuple(range(len(hidden))))
        found = [each.token_id for each in head.decide(hidden, names) if each is not None]
        for row in range(len(hidden)):
            head.states.close(row)
        assert len(found) == len(hidden)
        return found

    assert drawn(SamplingParameters(temperature=0.0)) == logits.argmax(1).tolist()
    best = logits.topk(20).indices.tolist()
    found = drawn(SamplingParameters(top_k=20, top_p=0.9, seed=3))
    assert all(token in row for token, row in zip(found, best, strict=True))
    assert drawn(SamplingParameters(seed=3)) == drawn(SamplingParameters(seed=3))
    assert drawn(SamplingParameters(min_p=0.05, frequency_penalty=0.5)) != found
    print("certified draws are those of every logit")


if __name__ == "__main__":
    main()
