"""A shard of the output head: from hidden states to the tokens that can still be drawn.

Two steps, with room for an exchange between shards: `Shard.screen` finds per row a threshold that
the answer certainly reaches, `Shard.rescore` gives the canonical logits of every token that may
reach it. What the screen computes with is its own affair; callers see `Thresholds.tau` only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from actors.messages import Adjustment, Candidates, Certificate, Need
from kernels.normalizer import log_normalizer
from kernels.penalties import Adjustments, adjust
from kernels.rows import canonical_logits, postprocess
from kernels.search import (
    GREEDY,
    GUMBEL,
    MIN_P,
    TOP_K,
    Needs,
    find_candidates,
    find_thresholds,
)

# Half the distance from 1 to the next fp32 number: the relative error of one rounding.
UNIT_ROUNDOFF = 2.0**-24
# Beyond this, fp32 sums might overflow on the way and an estimate says nothing.
LARGEST_BOUND = 1e37
# The integer masses of top-p (`kernels.truncate`) add up to less than 2**63 below this size.
LARGEST_VOCABULARY = 1 << 20
Linear = Callable[[torch.Tensor], torch.Tensor]


class NonFiniteHiddenError(ValueError):
    """A hidden state contains NaN or infinity, so no token can be drawn from it."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"hidden states of rows {list(self.rows)} contain NaN or infinity: the model body "
            "overflowed or its weights are damaged"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Thresholds:
    """What a screen leaves behind for the rescoring of the same rows.

    ``tau`` [S] is the only part shards exchange: the larger of two shards' thresholds holds for
    their union (`dataclasses.replace` puts it back). ``screened`` [S] are the rows it belongs to;
    all others are dense.
    """

    tau: npt.NDArray[np.float64]  # [S]
    screened: npt.NDArray[np.int64]  # [S]
    needs: tuple[Need, ...]  # [N]
    hidden: npt.NDArray[np.float32]  # [N, d]
    adjustments: Adjustments  # N rows
    search: Needs  # S rows
    screened_adjustments: Adjustments  # S rows
    estimate: npt.NDArray[np.float32]  # [S, V]
    slack: npt.NDArray[np.float64]  # [S]


class Shard:
    """The output rows of one shard and their canonical logits.

    ``weight`` [V, d] fp32 or bf16, ``bias`` [V] or None; then the model's own ``scale`` and
    ``softcap`` (see `kernels.rows.postprocess`). Rows at or beyond ``vocabulary_size``, the
    tokenizer's, are padding and never candidates. ``linear`` replaces the fp32 product ``hidden @
    weight.T`` -> [N, V or vocabulary_size] of the screen; it must add up fp32 products in fp32,
    in any order, without bias. Without it, bf16 weights are kept in fp32 as well.

    Raises `ValueError` where shapes do not fit or the weights are not finite.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
        linear: Linear | None = None,
    ) -> None:
        if not 0 < vocabulary_size <= weight.shape[0]:
            raise ValueError(
                f"vocabulary size {vocabulary_size} does not fit {weight.shape[0]} output rows"
            )
        if vocabulary_size >= LARGEST_VOCABULARY:
            raise ValueError(f"vocabularies have fewer than {LARGEST_VOCABULARY} tokens")
        self.vocabulary_size = vocabulary_size
        self._weight = weight.detach()[:vocabulary_size].contiguous()
        self._softcap = softcap
        self._scale = scale
        self._bias: npt.NDArray[np.float32] | None = None
        self._bias_tensor: torch.Tensor | None = None
        if bias is not None:
            self._bias_tensor = bias.detach()[:vocabulary_size].float().contiguous()
            self._bias = self._bias_tensor.numpy()
        self._largest_bias = 0.0 if self._bias is None else float(np.abs(self._bias).max())
        self._largest_norm = _largest_row_norm(self._weight)
        if not math.isfinite(self._largest_norm + self._largest_bias):
            raise ValueError("the output weights or biases contain NaN or infinity")
        if linear is None:
            screen_weight = self._weight.float()
            linear = functools.partial(torch.nn.functional.linear, weight=screen_weight)
        self._linear = linear
        self._row_bytes = self._weight.shape[1] * self._weight.element_size()
        self._ids = np.arange(vocabulary_size, dtype=np.int32)

    def screen(
        self, hidden: torch.Tensor | npt.NDArray[np.float32], needs: Sequence[Need]
    ) -> Thresholds:
        """Thresholds of the rows of ``hidden`` [N, d] fp32, one `Need` per row.

        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        tensor = torch.as_tensor(hidden, dtype=torch.float32).detach()
        array = tensor.numpy()
        if len(needs) != len(array):
            raise ValueError(f"{len(array)} hidden states but {len(needs)} needs")
        norms = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
        if not np.isfinite(norms).all():
            raise NonFiniteHiddenError(np.flatnonzero(~np.isfinite(norms)).tolist())
        adjustments = flatten_adjustments([need.adjustment for need in needs])
        rows = [row for row, need in enumerate(needs) if need.kind != "dense"]
        screened = np.array(rows, np.int64)
        chosen_adjustments = adjustments
        if len(rows) < len(needs):
            tensor = tensor[torch.from_numpy(screened)]
            chosen_adjustments = flatten_adjustments([needs[row].adjustment for row in rows])
        search = flatten_needs([needs[row] for row in rows])
        slack = self._slack(norms[screened])
        if rows:
            estimate = self._estimate(tensor)
            tau = find_thresholds(estimate, slack, self.vocabulary_size, search, chosen_adjustments)
        else:
            estimate = np.empty((0, self.vocabulary_size), np.float32)
            tau = np.empty(0, np.float64)
        return Thresholds(
            tau=tau,
            screened=screened,
            needs=tuple(needs),
            hidden=array,
            adjustments=adjustments,
            search=search,
            screened_adjustments=chosen_adjustments,
            estimate=estimate,
            slack=slack,
        )

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Canonical logits of every token that may reach its row's threshold, and of all tokens
        of dense rows, with a certificate per row."""
        ids, offsets = self._candidate_ids(thresholds)
        raw = self._canonical(thresholds, ids, offsets)
        if self._bias is not None:
            raw = postprocess(raw, bias=self._bias[ids])
        raw = postprocess(raw, scale=self._scale, softcap=self._softcap)
        logits = raw
        if thresholds.adjustments.active.any():
            logits = adjust(ids, raw, offsets, thresholds.adjustments)
        return Candidates(
            ids=ids,
            logits=logits,
            raw=raw,
            offsets=offsets,
            certificates=self._certificates(thresholds, offsets),
        )

    def log_normalizers(
        self, candidates: Candidates, rows: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Per row the log-sum-exp of the raw canonical logits of all tokens [N], NaN for rows not
        in ``rows``. Those in ``rows`` must be dense."""
        result = np.full(len(candidates.certificates), np.nan)
        for row in rows:
            start, stop = candidates.offsets[row], candidates.offsets[row + 1]
            if stop - start != self.vocabulary_size:
                raise ValueError(f"row {row} is not dense: its normalizer is not known")
            result[row] = log_normalizer(candidates.raw[start:stop])
        return result

    def _estimate(self, hidden: torch.Tensor) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            estimate = self._linear(hidden)
            if self._bias_tensor is not None:
                estimate = estimate[:, : self.vocabulary_size] + self._bias_tensor
            if self._scale != 1.0:
                estimate = estimate * self._scale
            if self._softcap is not None:
                estimate = torch.tanh(estimate / self._softcap) * self._softcap
        return estimate.contiguous().numpy()

    def _slack(self, norms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """How far estimates of hidden states with these norms are from canonical logits, at most.

        An fp32 sum of ``d`` products in any order errs by ``gamma_d = d u / (1 - d u)`` of
        ``||W_i|| ||h||`` (``u`` = 2**-24), the canonical rounding by ``u``; later roundings add
        ``u`` of their result on either side. ``tanh`` is 1-Lipschitz, and fp32 tanh is trusted to
        8 units in the last place of the cap.
        """
        depth = self._weight.shape[1] * UNIT_ROUNDOFF
        size = self._largest_norm * norms * (1.0 + 1e-6)
        slack = (depth / (1.0 - depth) + 2 * UNIT_ROUNDOFF) * size + 1e-38
        if self._bias is not None:
            size = size + self._largest_bias
            slack = slack + 4 * UNIT_ROUNDOFF * size
        if self._scale != 1.0:
            size = size * abs(self._scale)
            slack = slack * abs(self._scale) + 4 * UNIT_ROUNDOFF * size
        if self._softcap is not None:
            slack = slack + 2.0**-20 * self._softcap
        return np.where(size < LARGEST_BOUND, slack * (1.0 + 1e-6), np.inf)

    def _candidate_ids(
        self, thresholds: Thresholds
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        ids = np.empty(0, np.int32)
        counts = np.full(len(thresholds.needs), self.vocabulary_size, np.int64)
        found = np.zeros(1, np.int64)
        if len(thresholds.screened):
            ids, found = find_candidates(
                thresholds.estimate,
                thresholds.slack,
                self.vocabulary_size,
                thresholds.search,
                thresholds.screened_adjustments,
                thresholds.tau,
            )
            if len(thresholds.screened) == len(counts):
                return ids, found
            counts[thresholds.screened] = np.diff(found)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        merged = np.empty(offsets[-1], np.int32)
        place = {row: index for index, row in enumerate(thresholds.screened.tolist())}
        for row in range(len(counts)):
            index = place.get(row)
            own = self._ids if index is None else ids[found[index] : found[index + 1]]
            merged[offsets[row] : offsets[row + 1]] = own
        return merged, offsets

    def _canonical(
        self,
        thresholds: Thresholds,
        ids: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        """Canonical products; dense rows share one pass over the weights."""
        rows = len(thresholds.needs)
        if len(thresholds.screened) == rows:
            return canonical_logits(thresholds.hidden, self._weight, ids, offsets)
        dense = np.setdiff1d(np.arange(rows), thresholds.screened)
        every = canonical_logits(thresholds.hidden[dense], self._weight)
        if len(dense) == rows:
            return every.reshape(-1)
        raw = np.empty(len(ids), np.float32)
        for index, row in enumerate(dense.tolist()):
            raw[offsets[row] : offsets[row + 1]] = every[index]
        screened = thresholds.screened
        own = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in screened])
        sizes = np.diff(offsets)[screened]
        own_offsets = np.concatenate([[0], np.cumsum(sizes)])
        raw[own] = canonical_logits(
            thresholds.hidden[screened], self._weight, ids[own], own_offsets
        )
        return raw

    def _certificates(
        self, thresholds: Thresholds, offsets: npt.NDArray[np.int64]
    ) -> tuple[Certificate, ...]:
        """The bytes of the screen are shared equally by the rows it served."""
        counts = np.diff(offsets).tolist()
        screened = len(thresholds.screened)
        dense = len(counts) - screened
        screen_bytes = self.vocabulary_size * self._weight.shape[1] * 4 // max(screened, 1)
        dense_bytes = self.vocabulary_size * self._row_bytes // max(dense, 1)
        unknown = set(thresholds.screened[np.isnan(thresholds.tau)].tolist())
        return tuple(
            Certificate("dense", "dense", "dense-fp32", count, dense_bytes)
            if need.kind == "dense"
            else Certificate(
                need.kind,
                "dense" if row in unknown else "deterministic",
                "dense-fp32",
                count,
                screen_bytes + count * self._row_bytes,
                1.0,
                row in unknown,
            )
            for row, (need, count) in enumerate(zip(thresholds.needs, counts, strict=True))
        )


def _largest_row_norm(weight: torch.Tensor) -> float:
    """``max ||W_i||``, rounded up."""
    largest = max(float(rows.double().square().sum(dim=1).max()) for rows in weight.split(8192))
    return math.sqrt(largest) * (1.0 + 1e-12)


def flatten_needs(needs: Sequence[Need]) -> Needs:
    """The search's view of the needs of N rows (none of them dense)."""
    return Needs(
        kind=np.array([_kind(need) for need in needs], np.int64),
        k=np.array([need.k for need in needs], np.int64),
        log_min_p=np.array(
            [math.log(need.min_p) if need.kind == "minp" else 0.0 for need in needs], np.float64
        ),
        key=np.array([need.key for need in needs], np.uint64),
        position=np.array([need.position for need in needs], np.uint64),
        inverse_temperature=np.array([need.inverse_temperature for need in needs], np.float64),
    )


def _kind(need: Need) -> int:
    if need.kind == "topk":
        return TOP_K
    if need.kind == "minp":
        return MIN_P
    return GUMBEL if need.inverse_temperature else GREEDY


@functools.cache
def _no_adjustments(rows: int) -> Adjustments:
    ids, counts = np.empty(0, np.int32), np.empty(0, np.int32)
    offsets, off = np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_)
    zero = np.zeros(rows, np.float32)
    return Adjustments(
        off,
        np.ones(rows, np.float32),
        zero,
        zero,
        ids,
        counts,
        offsets,
        ids,
        np.empty(0, np.float32),
        offsets,
        ids,
        offsets,
        ids,
        offsets,
        off,
    )


def flatten_adjustments(adjustments: Sequence[Adjustment | None]) -> Adjustments:
    """The adjustments of N rows as flat arrays; None is a row without any."""
    given = [adjustment for adjustment in adjustments if adjustment is not None]
    if not given:
        return _no_adjustments(len(adjustments))
    nothing = np.empty(0, np.int32)

    def offsets(sizes: list[int]) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *sizes], dtype=np.int64)

    allowed = [nothing if a is None or a.allowed is None else a.allowed for a in adjustments]
    return Adjustments(
        active=np.array([a is not None for a in adjustments], np.bool_),
        repetition=np.array([1.0 if a is None else a.repetition for a in adjustments], np.float32),
        frequency=np.array([0.0 if a is None else a.frequency for a in adjustments], np.float32),
        presence=np.array([0.0 if a is None else a.presence for a in adjustments], np.float32),
        seen_ids=np.concatenate([a.seen_ids for a in given]),
        output_counts=np.concatenate([a.output_counts for a in given]),
        seen_offsets=offsets([0 if a is None else len(a.seen_ids) for a in adjustments]),
        bias_ids=np.concatenate([a.bias_ids for a in given]),
        bias_values=np.concatenate([a.bias_values for a in given]),
        bias_offsets=offsets([0 if a is None else len(a.bias_ids) for a in adjustments]),
        banned=np.concatenate([a.banned for a in given]),
        banned_offsets=offsets([0 if a is None else len(a.banned) for a in adjustments]),
        allowed=np.concatenate(allowed),
        allowed_offsets=offsets([len(ids) for ids in allowed]),
        restricted=np.array(
            [a is not None and a.allowed is not None for a in adjustments], np.bool_
        ),
    )
