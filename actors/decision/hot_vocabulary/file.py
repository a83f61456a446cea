"""The hot-vocabulary file: tokens in order of falling frequency, and what was measured about them.

safetensors with one tensor, ``ids`` int32 [V], and one header entry that holds the SHA-256 of a
JSON text and the text itself: the fields of `About`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lexshard.kernels.hot_vocab import Cost, Curve, best_size, expected_cost, fit_cost, skip_rate

FORMAT = 2
KEY = "lexshard-hot-vocabulary"
FILE_NAME = "hot.lexshard"
AGAIN = "build it again with `lexshard hotset build`"


@dataclass(frozen=True, slots=True)
class About:
    """Where the numbers come from. Nothing here changes a token."""

    model: str
    vocabulary_size: int
    tokenizer: str | None  # SHA-256 of tokenizer.json
    traces: tuple[str, ...]
    counted_tokens: int
    generated_tokens: int
    positions: int  # measured at
    seed: int
    sizes: tuple[int, ...]  # [m] of the hot set
    visited: tuple[float, ...]  # [m] tail tokens per row
    seconds: tuple[float, ...]  # [m] per row, on the machine that built the file


@dataclass(frozen=True, slots=True, eq=False)
class HotFile:
    """Token ids [V] by falling frequency, each exactly once, and what was measured."""

    ids: npt.NDArray[np.int32]
    about: About

    @property
    def curve(self) -> Curve:
        """The skip rate by the size of the hot set."""
        sizes = np.array(self.about.sizes, np.int64)
        visited = np.array(self.about.visited)
        return Curve(sizes, skip_rate(sizes, visited, self.about.vocabulary_size))

    @property
    def cost(self) -> Cost:
        """What visiting a token cost where the file was made; a server measures its own."""
        about = self.about
        return fit_cost(np.array(about.sizes), np.array(about.visited), np.array(about.seconds))


def tokenizer_hash(folder: str | Path) -> str | None:
    """SHA-256 of a model folder's tokenizer.json, None where there is none."""
    path = Path(folder) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def write_hot_file(path: str | Path, hot: HotFile) -> None:
    """Write a file that appears whole or not at all; the same content gives the same bytes.

    Raises OSError where it cannot be written.
    """
    target = Path(path)
    text = json.dumps(
        {"format": FORMAT, "ids": _digest(hot.ids), "about": msgspec.to_builtins(hot.about)}
    )
    description = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    try:
        save_file({"ids": np.ascontiguousarray(hot.ids)}, unfinished, metadata={KEY: description})
        unfinished.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(unfinished, target)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_hot_file(
    path: str | Path, vocabulary_size: int | None = None, tokenizer: str | None = None
) -> HotFile:
    """The file at ``path``, checked against a model's vocabulary size and `tokenizer_hash`.

    None checks nothing. Raises ValueError for a file that is missing, damaged, of another format
    or of another model.
    """
    if not Path(path).is_file():
        raise ValueError(f"no hot vocabulary at {path}: make one with `lexshard hotset build`")
    try:
        with safe_open(str(path), "np") as file:
            description = (file.metadata() or {}).get(KEY, "")
            ids = file.get_tensor("ids") if description else None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {AGAIN}") from error
    if ids is None:
        raise ValueError(f"{path} is not a hot vocabulary: give a file of `lexshard hotset build`")
    digest, _, text = description.partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{path} is damaged (its header has changed): {AGAIN}")
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {content['format']}, this version reads {FORMAT}: {AGAIN}"
        )
    if _digest(ids) != content["ids"]:
        raise ValueError(f"{path} is damaged (its token ids have changed): {AGAIN}")
    about = msgspec.convert(content["about"], About)
    if vocabulary_size is not None and about.vocabulary_size != vocabulary_size:
        raise ValueError(
            f"{path} is for a vocabulary of {about.vocabulary_size:,} tokens ({about.model}), "
            f"this model has {vocabulary_size:,}: {AGAIN}"
        )
    if tokenizer is not None and about.tokenizer is not None and about.tokenizer != tokenizer:
        raise ValueError(f"{path} was made with another tokenizer ({about.model}): {AGAIN}")
    return HotFile(ids, about)


def describe(path: Path, hot: HotFile) -> str:
    """What `lexshard hotset` prints: measured times beside those of the cost model."""
    about, curve, cost = hot.about, hot.curve, hot.cost
    fitted = expected_cost(curve.sizes, curve.skip_rate, cost, about.vocabulary_size)
    best = best_size(curve, cost, about.vocabulary_size)
    columns = (about.sizes, curve.skip_rate, about.visited, about.seconds, fitted)
    return "\n".join(
        [
            f"hot vocabulary {path}",
            f"  model        {about.model}, {about.vocabulary_size:,} tokens",
            f"  traces       {', '.join(about.traces)}: {about.counted_tokens:,} tokens counted, "
            f"{about.generated_tokens:,} generated by the model",
            f"  measured at  {about.positions} other positions, equal shares of the ways of "
            "sampling",
            f"  cost         {1e6 * cost.fixed:.1f} microseconds per row, "
            f"{1e6 * cost.two_goes:.1f} more with any hot tokens, "
            f"{1e9 * cost.per_token:.2f} nanoseconds per token",
            "",
            "  tokens visited first (H), share of the others that is not visited, tokens visited,",
            "  microseconds per row: measured, and by the cost model",
            f"  {'H':>9} {'a(H)':>8} {'visits':>9} {'measured':>9} {'fitted':>9}",
            *(
                f"  {size:>9,} {100 * rate:>7.2f}% {size + visited:>9,.0f} "
                f"{1e6 * seconds:>9.1f} {1e6 * model:>9.1f}"
                for size, rate, visited, seconds, model in zip(*columns, strict=True)
            ),
            "",
            f"optimum: H = {best:,}" if best else "optimum: H = 0, off",
        ]
    )


def _digest(ids: npt.NDArray[np.int32]) -> str:
    return hashlib.sha256(f"{ids.dtype} {ids.shape}".encode() + ids.tobytes()).hexdigest()
