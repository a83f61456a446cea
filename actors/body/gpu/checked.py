"""What the body of a GPU does otherwise than transformers' code says, wherever that computes the
same: it is tried when a model is loaded, and left where it fails."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from textwrap import shorten

from lexshard.actors.body.errors import ModelRefusedError
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.capture import CudaCapture
from lexshard.actors.body.gpu.flash_attention import FlashInferAttention
from lexshard.actors.body.gpu.graphed_body import FIXED_ROWS, GraphedBody
from lexshard.actors.body.self_test import Expected, check_body
from lexshard.kernels.attention import BLOCK_SIZE


def attend_checked(
    body: GeneralBody, expected: Expected, tolerance: float, name: str = "flashinfer"
) -> None:
    """Attention by the library ``name`` where there is one and it computes what ours does and the
    plain forward pass. Whatever it raises, its compilers included, is a reason to do without."""
    if find_spec(name) is None:
        return
    try:
        longest = -(-body.max_positions // BLOCK_SIZE)
        flash = FlashInferAttention(
            import_module(name), body.attention_shape, body.settings, body.device, longest
        )
        difference = flash.largest_difference()
        if not difference <= tolerance:  # NaN must fail
            raise ValueError(f"it differs from ours by {difference:.3g} of the largest value")
        body.attend_by(flash)
        check_body(body, expected.token_ids, expected.hidden, "the plain forward pass", tolerance)
    except Exception as error:
        body.attend_by(None, _in_a_line(error))


def _in_a_line(error: Exception) -> str:
    """What an error says first; a compiler says much."""
    said = str(error).strip().split("\n\n")[0]
    return shorten(said, 200, placeholder=" ...") or type(error).__name__


def merge_checked(body: GeneralBody, expected: Expected, tolerance: float) -> None:
    """Products of one input as one where that computes what the plain forward pass does."""
    body.merge_products()
    try:
        check_body(body, expected.token_ids, expected.hidden, "the plain forward pass", tolerance)
    except (AssertionError, AttributeError, RuntimeError, ModelRefusedError):
        body.split_products()


def compile_checked(
    body: GeneralBody, expected: Expected, tolerance: float, backend: str = "inductor"
) -> None:
    """Compiled layers where they compile and compute what the plain forward pass does."""
    try:
        body.compile_layers(backend)
        check_body(body, expected.token_ids, expected.hidden, "the plain forward pass", tolerance)
    except (RuntimeError, ModelRefusedError) as error:
        body.interpret_layers(_in_a_line(error))


def graphed_body(
    body: GeneralBody, expected: Expected, tolerance: float, batch_invariant: bool
) -> GraphedBody:
    """Steps as CUDA graphs, checked like those that are not.

    Only a body whose steps have one shape can promise that rows do not depend on those beside them:
    short test sequences may agree by chance where shapes differ.
    """
    graphed = GraphedBody(body, CudaCapture, fixed_rows=FIXED_ROWS if batch_invariant else None)
    same = check_body(
        graphed, expected.token_ids, expected.hidden, "the plain forward pass", tolerance
    )
    if graphed.refusal and body.flash is not None:
        body.attend_by(None, graphed.refusal)  # it may be what cannot be recorded
        return graphed_body(body, expected, tolerance, batch_invariant)
    graphed.batch_invariant = same and batch_invariant
    return graphed
