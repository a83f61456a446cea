"""A shard of the output head on a GPU: the same tokens as `Shard`'s, from one CUDA graph per step.

Screen, leaders, threshold, candidates and their canonical products are found on the device
(`kernels.search.gpu`); post-processing, adjustments and everything after them happen on the host
in the arithmetic of `Shard`, on a few hundred tokens per row.

Who decides what:

- greedy, sampled, top-k (up to ``largest_k``) and min-p rows, with or without penalties, biases,
  bans and masks: the search on the device; top-p alone, too, where the token that is drawn from all
  is certainly in the nucleus;
- rows whose masks hold few tokens, and what the search leaves of others: the tokens of the mask;
- other top-p alone without any of these: its nucleus, from every canonical logit on the device;
- all others (epsilon, returned logprobs, larger k, other rows of top-p alone) and rows with more
  candidates than there is room for: every canonical logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.configuration import GPU_TIER
from lexshard.actors.head.backoff import LARGEST_UNCERTAIN, Backoff, ShareLeft
from lexshard.actors.head.gpu.device_rows import put_rows, some_rows
from lexshard.actors.head.gpu.device_step import (
    DeviceStep,
    PackedStep,
    StepResults,
    pack_step,
)
from lexshard.actors.head.gpu.nucleus_rows import LeftRows, NucleusRows, uncertain_rows
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.output_rows import computes_allowed, own_rows, refuse_unsound
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.screens import DENSE, tier_bytes
from lexshard.actors.messages import MASK_TIER, NUCLEUS_NEEDS, Certificate, NeedKind
from lexshard.actors.states.need import Adjustment, Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.quantize import Int8Tier
from lexshard.kernels.rows import postprocess
from lexshard.kernels.rows.triton_kernel import canonical_logits
from lexshard.kernels.screen.gpu import tensor_cores
from lexshard.kernels.search.gpu.search import Tokens, post_processing

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
CAPACITY = 1024  # candidates a row has room for
LARGEST_K = 64
LARGEST_SUPPORT = 1 << 17  # adjusted tokens of a step
DENSE_ROWS = 32  # rows whose canonical logits are computed at a time
EVERY_ROWS = (1, 2, 4, 8)  # of one program then: each is compiled on its own
MEMBERS = "draws from nuclei"

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Rows that one step of the device serves."""

    rows: tuple[int, ...]
    results: StepResults
    cuts: bool = False  # by top-p, from every canonical logit
    left: LeftRows | None = None  # those that the search left, likewise


@dataclass(frozen=True, slots=True, eq=False)
class DeviceScreening(Screening):
    """What a `DeviceShard` has under way on the device."""

    hidden: torch.Tensor  # [N, d], on either side of the bus
    launches: tuple[Launch, ...]


@dataclass(slots=True, eq=False)
class FoundRow:
    """One row on its way to `Candidates`."""

    ids: Ids
    products: Float32s  # canonical, before post-processing
    certificate: Certificate
    largest: float = 0.0  # upper bound of any logit


class DeviceShard:
    """The output rows of one shard on ``device``, with the interface of `Shard`. Its search goes by
    its own threshold, in one launch: to ask others in its midst would take longer than it does.

    ``weight``, ``bias``, ``softcap``, ``scale``, ``vocabulary_size`` and ``owned`` as for `Shard`;
    ``tier`` screens every step, from the device: coarser ones are read no faster there, and leave
    too much (docs/findings.md). ``largest_k`` is a power of two. Memory on the device: weights, the
    tier, and 8 bytes per row and vocabulary entry of the largest step.

    Raises `ValueError` where shapes do not fit or the weights are not finite.
    """

    asks_others = False

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
        tier: Int8Tier,
        *,
        device: torch.device | str = "cuda",
        capacity: int = CAPACITY,
        largest_k: int = LARGEST_K,
        owned: OwnedRows | None = None,
    ) -> None:
        self.owned = OwnedRows.every(vocabulary_size) if owned is None else owned
        self._size = size = len(self.owned.ids)
        rows, self._bias = own_rows(weight, bias, size)
        self.vocabulary_size = vocabulary_size
        self.weight = rows.to(device)
        self._scale = scale
        self._softcap = softcap
        self._capacity = capacity
        self._largest_k = largest_k
        if len(tier.scale) != size or tier.columns != weight.shape[1]:
            raise ValueError("the tier does not fit the output weights")
        self._screen = partial(tensor_cores.screen, placed=tensor_cores.place(tier, device))
        self._tier_bytes = tier_bytes(tier)
        own_bias = None if self._bias is None else torch.from_numpy(self._bias)
        self._post = post_processing(own_bias, scale, softcap, tier.largest_size, device)
        self._entries = torch.zeros(LARGEST_SUPPORT, 6, dtype=torch.int32, device=device)
        masks = (BUCKETS[-1], blocks_of(size))
        self._mask_words = torch.zeros(masks, dtype=torch.int64, device=device)
        self._steps: dict[int, DeviceStep] = {}
        cuda = self.weight.is_cuda
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._rows = np.arange(size, dtype=np.int32)
        ids = None if self.owned.whole else torch.from_numpy(self.owned.ids).to(device)
        self._tokens = Tokens(ids, self.owned.by_block)
        self._backoff, self._uncertain = Backoff(), ShareLeft(LARGEST_UNCERTAIN)
        self._nuclei: NucleusRows | None = None
        if self.owned.whole and softcap is None:
            self._nuclei = NucleusRows(self.weight, self._post, capacity)
        self._row_bytes = weight.shape[1] * weight.element_size()

    def warm_up(self, largest: int = BUCKETS[-1]) -> None:
        """Compiles every kernel and captures the graphs of steps of up to ``largest`` rows."""
        need = Need("top1")
        for bucket in _buckets(largest):
            hidden = torch.zeros(bucket, self.weight.shape[1], device=self.weight.device)
            launch = self._launch(range(bucket), hidden, RowTable.of([need] * bucket))
            assert launch is not None, "a step without adjustments always has room"
            launch.results.read()
        for rows in EVERY_ROWS:
            hidden = torch.zeros(rows, self.weight.shape[1], device=self.weight.device)
            self._products(hidden, None)
            if self._nuclei is not None:
                nuclei = RowTable.of([Need("nucleus", top_p=0.5, inverse_temperature=1.0)] * rows)
                self._nuclei.launch(hidden, nuclei).read()
                self._nuclei.finish(self._step(rows), [True] * rows, rows).read()

    def replay(self, rows: int) -> Callable[[], None]:
        """What runs the last step of ``rows`` rows again on the device alone: for measuring."""
        return self._step(rows).replay

    # -- screening --------------------------------------------------------------------------------

    def screen(
        self, hidden: Hidden, rows: RowTable, before: torch.Tensor | None = None
    ) -> Thresholds:
        """Starts the search for ``rows``, whose hidden states are ``hidden`` [N, d] fp32, and which
        have seen one token more each than they say, if there are tokens ``before`` [N].

        Hidden states on the device stay there. Raises `NonFiniteHiddenError` naming the rows that
        contain NaN or infinity; for hidden states on the device `rescore` does.
        """
        states = torch.as_tensor(hidden, dtype=torch.float32).detach()
        if len(rows) != len(states):
            raise ValueError(f"{len(states)} hidden states of {len(rows)} rows")
        if not states.is_cuda:
            refuse_unsound(torch.isfinite(states).all(dim=1).numpy())
        drawn_nuclei = self._drawn_nuclei(rows)
        searched = [row for row in range(len(rows)) if self._searches(rows, row, drawn_nuclei)]
        launches = []
        device = self.weight.device
        tau = torch.full((len(rows),), math.nan, dtype=torch.float64, device=device)
        drawn = torch.full((len(rows),), -1, dtype=torch.int32, device=device)
        for start in range(0, len(searched), BUCKETS[-1]):
            own = searched[start : start + BUCKETS[-1]]
            launch = self._launch(own, states, rows, before)
            if launch is not None:
                launch = self._with_nuclei(launch, rows, drawn_nuclei)
                launches.append(launch)
                # A copy at once: the next launch of this size writes to the same memory.
                put_rows(tau, own, launch.results.thresholds[: len(own)])
                put_rows(drawn, own, launch.results.drawn[: len(own)])
        nuclei = [
            row for row in range(len(rows)) if row not in drawn_nuclei and self._cuts(rows, row)
        ]
        if nuclei and self._nuclei is not None:
            results = self._nuclei.launch(some_rows(states, nuclei), rows.some(nuclei))
            launches.append(Launch(tuple(nuclei), results, cuts=True))
            put_rows(drawn, nuclei, results.drawn)
        draws_all = self.owned.whole and sum(len(each.rows) for each in launches) == len(rows)
        # What a search leaves of other rows, one in five or so, waits for the host.
        draws_all &= all(self._cuts(rows, row) for row in drawn_nuclei)
        return Thresholds(
            tau,
            rows,
            DeviceScreening(states, tuple(launches)),
            drawn=drawn if draws_all else None,
        )

    def _drawn_nuclei(self, rows: RowTable) -> frozenset[int]:
        """The rows that draw from their nucleus and are searched as if they drew from all."""
        drawn = [row for row, kind in enumerate(rows.kinds) if kind == "nucleus-draw"]
        if not drawn or not self.owned.whole or not self._backoff.allows(MEMBERS):
            return frozenset()
        worth = uncertain_rows(rows.controls.top_p[drawn].tolist()) > 0
        return frozenset(drawn if worth else ())

    def _with_nuclei(self, launch: Launch, rows: RowTable, drawn: Set[int]) -> Launch:
        """``launch`` and, of what its search leaves of the rows that have ``drawn`` from their
        nucleus, the nuclei."""
        able = [row in drawn and self._cuts(rows, row) for row in launch.rows]
        asked = [row for row, can in zip(launch.rows, able, strict=True) if can]
        if not asked:
            return launch
        assert self._nuclei is not None
        room = max(1, uncertain_rows(rows.controls.top_p[asked].tolist()))
        left = self._nuclei.finish(self._step(len(launch.rows)), able, room)
        return replace(launch, left=left)

    def _searches(self, rows: RowTable, row: int, drawn: Set[int]) -> bool:
        if computes_allowed(rows, row, self.vocabulary_size):
            return False
        kind = rows.kinds[row]
        return (
            kind in ("top1", "minp")
            or row in drawn
            or (kind == "topk" and 0 < rows.controls.top_k[row] <= self._largest_k)
        )

    def _cuts(self, rows: RowTable, row: int) -> bool:
        """Whether the nucleus of a row is found on the device."""
        plain = rows.kinds[row] in NUCLEUS_NEEDS and rows.adjustments[row] is None
        return plain and self._nuclei is not None

    def _launch(
        self,
        searched: Sequence[int],
        hidden: torch.Tensor,
        rows: RowTable,
        before: torch.Tensor | None = None,
    ) -> Launch | None:
        packed = self._packed(rows.some(searched), grows=before is not None)
        if len(packed.support.entries) > len(self._entries):
            return None
        states = some_rows(hidden, searched)
        step = self._step(len(searched))
        own = None if before is None else some_rows(before, searched)
        return Launch(tuple(searched), step.launch(states, packed, own))

    def _packed(self, rows: RowTable, *, grows: bool) -> PackedStep:
        seen = list(map(self._seen, rows.adjustments))
        adjustments = self.owned.of_rows(rows.flat)
        return pack_step(rows.search(), rows.controls, adjustments, seen, self._size, grows=grows)

    def _seen(self, adjustment: Adjustment | None) -> Ids:
        """The rows of this shard that are tokens seen by what is penalised."""
        return NO_ROWS if adjustment is None else self.owned.among(adjustment.seen_ids())

    def _step(self, rows: int) -> DeviceStep:
        bucket = next(bucket for bucket in BUCKETS if bucket >= rows)
        step = self._steps.get(bucket)
        if step is None:
            step = self._steps[bucket] = DeviceStep(
                bucket,
                self.weight,
                self._screen,
                self._post,
                self._entries,
                self._mask_words,
                self._tokens,
                capacity=self._capacity,
                leaders=self._largest_k,
                pool=self._pool,
            )
        return step

    # -- rescoring --------------------------------------------------------------------------------

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Canonical logits of every token that may reach its row's threshold, and of all tokens
        of dense rows, with a certificate per row. Waits for the device.

        Where shards share a larger threshold, what this one keeps by its own is still enough.
        """
        step = thresholds.screening
        assert isinstance(step, DeviceScreening)
        rows = thresholds.rows
        found: list[FoundRow | None] = [None] * len(rows)
        read = [0] * len(rows)
        sound = np.ones(len(rows), np.bool_)
        drawn = np.full(len(rows), -1, np.int32)
        for launch in step.launches:
            drawn[list(launch.rows)] = self._collect(launch, rows, found, read, sound)
        dense = [row for row in range(len(rows)) if found[row] is None]
        if step.hidden.is_cuda and dense:
            finite = torch.isfinite(step.hidden[dense]).all(dim=1)
            sound[dense] &= finite.cpu().numpy()
        refuse_unsound(sound)
        self._complete(step, rows, found, read)
        candidates = self._candidates(rows.flat, [row for row in found if row is not None])
        return candidates if thresholds.drawn is None else replace(candidates, drawn=drawn)

    def _collect(
        self,
        launch: Launch,
        rows: RowTable,
        found: list[FoundRow | None],
        read: list[int],
        sound: npt.NDArray[np.bool_],
    ) -> Ids:
        """Fills in what a launch has decided, and what every row of it has read; what its rows
        drew."""
        largest, finite, counts, drawn, candidates, products = launch.results.read()
        whole = launch.cuts
        pass_bytes = self._size * self._row_bytes if whole else self._tier_bytes
        share = pass_bytes // len(launch.rows)
        for place_in_step, row in enumerate(launch.rows):
            kind, count = rows.kinds[row], int(counts[place_in_step])
            leaders = 0 if whole else int(rows.controls.top_k[row]) if kind == "topk" else 4
            read[row] = share + leaders * self._row_bytes
            sound[row] = bool(finite[place_in_step])
            if count > self._capacity:
                continue
            ids, own_products = candidates[place_in_step, :count], products[place_in_step, :count]
            if whole:
                found[row] = self._cut(kind, ids, own_products, read[row])
                continue
            found[row] = FoundRow(
                ids,
                own_products,
                self._certified(kind, count, read[row]),
                float(largest[place_in_step]),
            )
        drawing = [] if whole else [r for r in launch.rows if rows.kinds[r] == "nucleus-draw"]
        if drawing:
            open_share = sum(found[row] is None for row in drawing) / len(drawing)
            self._backoff.record(MEMBERS, failed=self._uncertain.record(MEMBERS, open_share))
        own: Ids = drawn[: len(launch.rows)]
        if launch.left is not None:
            self._collect_left(launch, launch.left, rows, found, own)
        return own

    def _collect_left(
        self,
        launch: Launch,
        left: LeftRows,
        rows: RowTable,
        found: list[FoundRow | None],
        drawn: Ids,
    ) -> None:
        """Fills in the nuclei of rows whose search told too little, and what those drew."""
        places, (_, _, counts, own_drawn, candidates, products) = left.read()
        for slot, place in enumerate(places.tolist()):
            count, row = int(counts[slot]), launch.rows[place]
            drawn[place] = own_drawn[slot]
            if count <= self._capacity:
                cost = self._size * self._row_bytes // len(places)
                own = candidates[slot, :count], products[slot, :count]
                found[row] = self._cut(rows.kinds[row], *own, cost, fallback=True)

    def _cut(
        self, kind: NeedKind, ids: Ids, products: Float32s, read: int, *, fallback: bool = False
    ) -> FoundRow:
        """A row's nucleus, which every canonical logit has told."""
        order = ids.argsort()
        certificate = Certificate(kind, "deterministic", DENSE, self._size, read, fallback=fallback)
        return FoundRow(ids[order], products[order], certificate)

    def _complete(
        self,
        step: DeviceScreening,
        rows: RowTable,
        found: list[FoundRow | None],
        read: Sequence[int],
    ) -> None:
        """Fills in the rows that no launch has decided."""
        dense = []
        for row, (kind, adjustment) in enumerate(zip(rows.kinds, rows.adjustments, strict=True)):
            if found[row] is not None:
                continue
            mask = None if adjustment is None else adjustment.mask
            if kind == "dense" or mask is None:
                dense.append(row)
                continue
            ids = self.owned.among(mask.ids)
            hidden = step.hidden[row : row + 1].to(self.weight.device)
            products = self._products(hidden, ids)
            share, cost = len(ids) / self._size, len(ids) * self._row_bytes
            certificate = Certificate(
                kind, "deterministic", MASK_TIER, len(ids), cost, share, tightness=0.0
            )
            found[row] = FoundRow(ids, products, certificate)
        passes = self._size * self._row_bytes // max(len(dense), 1)
        for start in range(0, len(dense), DENSE_ROWS):
            some = dense[start : start + DENSE_ROWS]
            hidden = step.hidden[some].to(self.weight.device)
            for products, row in zip(self._products(hidden, None), some, strict=True):
                kind, cost, tried = rows.kinds[row], read[row] + passes, read[row] > 0
                certificate = Certificate(kind, "dense", DENSE, self._size, cost, fallback=tried)
                found[row] = FoundRow(self._rows, products, certificate)

    def _certified(self, kind: NeedKind, count: int, read: int) -> Certificate:
        """Of a row whose bounds read so many bytes and left ``count`` tokens to compute."""
        cost, share = read + count * self._row_bytes, count / self._size
        return Certificate(kind, "deterministic", GPU_TIER, count, cost, share)

    def _finish(self, ids: Ids, products: Float32s) -> Float32s:
        """Raw canonical logits [I] from the products of rows ``ids``."""
        raw = products
        if self._bias is not None:
            raw = postprocess(raw, bias=self._bias[ids])
        return postprocess(raw, scale=self._scale, softcap=self._softcap)

    def _products(self, hidden: torch.Tensor, ids: Ids | None) -> Float32s:
        """Canonical products [N, V] of ``hidden`` on the device, or [I] of one row and ``ids``."""
        if ids is None:
            every = canonical_logits(hidden, self.weight)
        else:
            every = canonical_logits(
                hidden,
                self.weight,
                torch.from_numpy(np.ascontiguousarray(ids, np.int32)).to(hidden.device),
                torch.tensor([0, len(ids)], device=hidden.device),
            )
        # To memory that is not pinned a copy would go by way of memory that is.
        here = torch.empty(every.shape, dtype=every.dtype, pin_memory=every.is_cuda)
        result: Float32s = here.copy_(every).numpy()
        return result

    def _candidates(self, adjustments: Adjustments, found: Sequence[FoundRow]) -> Candidates:
        ids = np.concatenate([row.ids for row in found])
        offsets = np.cumsum([0, *(len(row.ids) for row in found)], dtype=np.int64)
        raw = np.concatenate([row.products for row in found])
        raw = self._finish(ids, raw)
        certificates = []
        for row, each in enumerate(found):
            # Of adjusted rows the best logit is not known here: their tightness says nothing.
            best = -math.inf
            if not adjustments.active[row]:
                best = float(raw[offsets[row] : offsets[row + 1]].max(initial=-math.inf))
            tightness = best / each.largest if 0 < best <= each.largest else 0.0
            certificates.append(replace(each.certificate, tightness=tightness))
        tokens = self.owned.tokens(ids)
        return Candidates(tokens, raw, offsets, tuple(certificates), adjustments)

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        """None: a device has no bounds on the whole softmax."""
        return []


def _buckets(largest: int) -> list[int]:
    """Those that steps of 1 to ``largest`` rows need."""
    return [
        bucket
        for below, bucket in zip((0, *BUCKETS), BUCKETS, strict=False)
        if below < max(largest, 1)
    ]
