"""The search on a device: nothing that can still matter is lost, and nothing else is kept.

The same checks run in Triton's interpreter, in a process of its own (it is chosen when triton is
imported), and on a CUDA device where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import (
    MASK_TIER,
    Certificate,
    Request,
    RowDecision,
    SamplingParameters,
)
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, RowTable, flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.penalties import adjust
from lexshard.kernels.quantize import quantize
from lexshard.kernels.rows import as_array, canonical_logits, postprocess, reference
from lexshard.kernels.screen import Screened
from lexshard.kernels.search.reference import compared_values, outward
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from tests.support.decisions import LooseStates, decide, screen_and_decide
from tests.support.interpreted import interpret
from tests.support.paths import ROOT
from tests.support.search_cases import answer, random_adjustment

KINDS = ("greedy", "top1", "topk", "minp")
# Post-processing: nothing, bias, scale, soft-cap, all of it.
HEADS = ((False, 1.0, None), (True, 1.0, None), (False, 0.125, None), (True, 0.7, 5.0))


def _need(random: np.random.Generator, kind: str, size: int, adjusted: bool) -> Need:
    adjustment = random_adjustment(random, size) if adjusted else None
    return Need(
        kind="top1" if kind == "greedy" else kind,  # type: ignore[arg-type]
        k=int(random.integers(1, 9)),
        min_p=float(random.choice([1e-3, 0.5])),
        key=int(random.integers(0, 2**64, dtype=np.uint64)),
        position=int(random.integers(0, 1000)),
        inverse_temperature=0.0
        if kind == "greedy"
        else float(np.float32(random.choice([0.5, 1.0, 1 / 0.7, 20.0]))),
        adjustment=adjustment,
    )


def _weights(random: np.random.Generator, size: int, flavour: str) -> np.ndarray:
    weight = random.standard_normal((size, 16)).astype(np.float32)
    if flavour == "ties":
        return weight.round(0)
    if flavour == "duplicates":
        return weight[random.integers(0, max(size // 3, 1), size)]
    if flavour == "zero":
        return np.zeros_like(weight)
    return weight


def _run(
    device: str,
    random: np.random.Generator,
    size: int,
    flavour: str,
    head: tuple[bool, float, float | None],
    needs: list[Need],
    *,
    width: float = 0.02,
    capacity: int = 128,
    leaders: int = 8,
    slack_factor: float = 1.0,
    terms: int = 2,
) -> bool:
    """Checks one search against brute force and the reference; True if no answer was lost."""
    from lexshard.kernels.search.gpu import packing, search

    rows = len(needs)
    hidden = random.standard_normal((rows, 16)).astype(np.float32) * 2
    weight = _weights(random, size, flavour)
    has_bias, scale, softcap = head
    bias = random.standard_normal(size).astype(np.float32) if has_bias else None
    raw = reference.canonical_logits(hidden, as_array(weight))
    norms = np.linalg.norm(weight.astype(np.float64), axis=1)
    row_slack = np.stack([width * norms * random.random(size), norms + 1e-30])
    row_slack = (row_slack * (1 + 1e-6)).astype(np.float32)
    length = np.linalg.norm(hidden.astype(np.float64), axis=1)
    hidden_slack = np.stack([length, 1e-5 * length, 1e-4 * length], axis=1)[:, :terms]
    error = hidden_slack[:, :2] @ row_slack.astype(np.float64)
    if terms == 3:
        error += hidden_slack[:, 2:]
    estimate = np.full((rows, size + int(random.integers(0, 70))), 1e30, np.float32)
    sign = random.choice([-1.0, 1.0, 0.3], (rows, size))
    estimate[:, :size] = raw + sign * error * (1 - 1e-5)
    hidden_slack[:, 1] += 2.0**-23 * length  # the rounding of the line above

    adjustments = flatten_adjustments([need.adjustment for need in needs])
    flat = RowTable.of(needs).search()
    seen = [
        np.empty(0, np.int32)
        if need.adjustment is None
        else OwnedRows.every(size).among(need.adjustment.seen_ids())
        for need in needs
    ]
    packed = packing.pack_support(adjustments, seen, size)
    integers, reals = packing.pack_questions(flat, RowTable.of(needs).controls)
    reals[:, 2], reals[:, 3] = packed.slope, packed.size
    masks = np.zeros((1, 1), np.int64)
    if len(adjustments.masks):
        masks = adjustments.masks.view(np.int64)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    entries = np.zeros((len(packed.entries) + 1, 6), np.int32)
    entries[:-1] = packed.entries
    screened = Screened(put(estimate), put(row_slack), put(slack_factor * hidden_slack))
    workspace = search.allocate(rows, size, capacity=capacity, leaders=leaders, device=device)
    largest = float(row_slack[1].max())
    questions = search.Questions(put(integers), put(reals))
    search.begin(put(hidden), questions, workspace)
    search.search(
        put(hidden),
        put(weight),
        screened,
        search.post_processing(
            None if bias is None else torch.from_numpy(bias), scale, softcap, largest, device
        ),
        questions,
        search.Support(put(packed.offsets), put(entries)),
        workspace,
        masks=search.RowMasks(put(masks), put(adjustments.mask), masks.shape[1]),
    )

    every = np.arange(size, dtype=np.int32)
    values = screened.estimate.cpu().numpy()[:, :size]  # post-processed and adjusted
    tau, counts = workspace.buffers.thresholds.cpu().numpy(), workspace.results.counts.cpu().numpy()
    factors = workspace.buffers.factors.cpu().numpy()
    sound = True
    for row, need in enumerate(needs):
        canonical = postprocess(raw[row], bias=bias, scale=scale, softcap=softcap)
        one = flatten_adjustments([need.adjustment])
        canonical = adjust(every, canonical, np.array([0, size]), one)
        # The candidates are exactly the ids whose upper bound reaches the threshold.
        with np.errstate(invalid="ignore"):
            slack = factors[row, 0] * row_slack[0] + factors[row, 1] * row_slack[1]
            slack = slack + factors[row, 2] + np.abs(values[row]) * np.float32(2.0**-22)
            upper = np.where(values[row] > -np.inf, values[row] + slack, -np.inf)
        scores = compared_values(upper.astype(np.float32), every, flat, row)
        scores = scores + (1e-5 if need.kind == "top1" and need.inverse_temperature else 0.0)
        expected = np.flatnonzero((scores >= tau[row]) & (values[row] > -np.inf))
        assert counts[row] == len(expected), (row, need.kind)
        kept = workspace.results.candidates[row, : min(counts[row], capacity)].cpu().numpy()
        assert np.array_equal(kept, expected[:capacity])
        # Their canonical products, bit for bit.
        products = workspace.results.logits[row, : len(kept)].cpu().numpy()
        assert np.array_equal(products, raw[row, kept])
        # Adjusted values are those of the kernel that adjusts (estimates know no soft-cap bits).
        found = kept if counts[row] <= capacity else every
        sound &= answer(need, found, canonical[found]) == answer(need, every, canonical)
        sound &= bool(np.all(upper >= canonical))
    if not adjustments.active.any() and not has_bias and scale == 1.0 and softcap is None:
        # Without anything else the factors are those of the search on the CPU.
        three = np.zeros(3)
        three[:terms] = slack_factor * hidden_slack[0]
        want = outward(values[0], row_slack, three)
        got = factors[0, 0] * row_slack[0] + factors[0, 1] * row_slack[1] + factors[0, 2]
        assert np.array_equal(got + np.abs(values[0]) * np.float32(2.0**-22), want)
    return sound


def check_no_answer_is_lost(device: str) -> None:
    flavours = (("plain", 300), ("ties", 1100), ("duplicates", 65), ("zero", 30))
    cases = [(HEADS[0], *flavour) for flavour in flavours]
    cases += [(head, *flavours[0]) for head in HEADS[1:]]
    for seed, (head, flavour, size) in enumerate(cases):
        random = np.random.default_rng(seed)
        needs = [_need(random, kind, size, seed % 2 == 0) for kind in KINDS]
        needs.insert(2, _need(random, "top1", size, True))
        assert _run(device, random, size, flavour, head, needs, terms=2 + seed % 2), seed


def check_a_wrong_slack_is_noticed(device: str) -> None:
    lost = 0
    for seed in range(4):
        random = np.random.default_rng(100 + seed)
        needs = [_need(random, kind, 300, False) for kind in KINDS]
        lost += not _run(device, random, 300, "plain", HEADS[0], needs, width=0.2, slack_factor=0.5)
    assert lost >= 3


def check_too_many_candidates_are_counted(device: str) -> None:
    random = np.random.default_rng(200)
    needs = [_need(random, kind, 300, False) for kind in KINDS]
    assert _run(device, random, 300, "zero", HEADS[0], needs, capacity=16)
    assert _run(device, random, 300, "plain", HEADS[0], needs, capacity=1, width=1.0)


def check_the_threshold_is_the_answer_itself(device: str) -> None:
    """With estimates that are exact, leaders are the best tokens and tau their k-th value."""
    from lexshard.kernels.search.gpu import packing, search

    random = np.random.default_rng(300)
    size, k = 2500, 50
    values = (3 * random.standard_normal((2, size))).astype(np.float32)
    weight = np.zeros((size, 16), np.float32)
    weight[:, 0] = values[0]
    hidden = np.zeros((2, 16), np.float32)
    hidden[:, 0] = 1.0
    rows = RowTable.of([Need("topk", k=k), Need("top1", key=9, inverse_temperature=1.0)])
    integers, reals = packing.pack_questions(rows.search(), rows.controls)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    workspace = search.allocate(2, size, capacity=256, leaders=64, device=device)
    questions = search.Questions(put(integers), put(reals))
    search.begin(put(hidden), questions, workspace)
    search.search(
        put(hidden),
        put(weight),
        Screened(put(values[[0, 0]]), put(np.zeros((2, size), np.float32)), put(np.zeros((2, 2)))),
        search.post_processing(None, 1.0, None, 1.0, device),
        questions,
        search.Support(
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(1, 6, dtype=torch.int32, device=device),
        ),
        workspace,
    )
    assert float(workspace.buffers.thresholds[0]) == float(np.sort(values[0])[-k])
    assert workspace.results.counts.tolist() == [k, 1]
    assert workspace.buffers.leader_counts.tolist() == [k, 4]


PARAMETERS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0, seed=3),
    SamplingParameters(temperature=0.7, top_k=5, top_p=0.9, seed=4),
    SamplingParameters(temperature=1.5, min_p=0.1, seed=5),
    SamplingParameters(temperature=0.9, top_k=200, seed=6),  # beyond the room for leaders
    SamplingParameters(temperature=1.0, top_p=0.8, seed=7),
    SamplingParameters(temperature=0.0, logprobs=3),
    SamplingParameters(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParameters(temperature=1.0, presence_penalty=-1.0, min_tokens=9, seed=8),
    SamplingParameters(temperature=0.8, top_k=3, logit_bias=((7, 4.0), (9, -100.0)), seed=9),
    SamplingParameters(temperature=1.0, allowed_ids=(3, 5, 250), bad_words=((5,),), seed=10),
    SamplingParameters(temperature=0.0, allowed_ids=tuple(range(40, 280, 2))),
    SamplingParameters(temperature=0.7, top_k=5, allowed_ids=tuple(range(299)), seed=11),
)


def _decide(
    shard: object, hidden: np.ndarray | torch.Tensor, size: int
) -> tuple[list[RowDecision | None], tuple[Certificate, ...]]:
    random = np.random.default_rng(0)
    states = []
    for row in range(len(hidden)):
        prompt = tuple(random.integers(0, size, 12).tolist())
        request = Request(f"r{row}", 0, prompt, PARAMETERS[row % len(PARAMETERS)], resumed_ids=(1,))
        states.append(SequenceState(request, size, (2,)))
    return screen_and_decide(shard, hidden, states)


def _tokens(decisions: list[RowDecision | None]) -> list[tuple[object, ...]]:
    return [(each.token_id, each.logprobs) for each in decisions if each is not None]


def check_the_shard_draws_the_tokens_of_the_cpu(device: str) -> None:
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    generator = torch.Generator().manual_seed(1)
    size, columns, rows = 300, 48, len(PARAMETERS)
    hidden = torch.randn(rows, columns, generator=generator).numpy()
    for has_bias, scale, softcap in (HEADS[0], HEADS[3]):
        weight = torch.randn(size + 5, columns, generator=generator).bfloat16()
        bias = torch.randn(size + 5, generator=generator) if has_bias else None
        tier = quantize(weight[:size], "int8")
        arguments = (weight, bias, softcap, scale, size)
        expected, _ = _decide(Shard(*arguments), hidden, size)
        ours = DeviceShard(*arguments, tier, device=device, capacity=256, largest_k=8)
        got, certificates = _decide(ours, hidden, size)
        assert _tokens(got) == _tokens(expected)
        # These draw from every logit; one more from those of its mask.
        host = (4, 5, 6) if softcap else (4, 6)
        guarantees = [each.guarantee for each in certificates]
        assert guarantees == ["dense" if row in host else "deterministic" for row in range(rows)]
        assert [row for row, each in enumerate(certificates) if each.tier == MASK_TIER] == [10]
        # So flat a row is drawn from all of its nucleus.
        assert [row for row, each in enumerate(certificates) if each.fallback] == [5]
        # Rows without room for their candidates have every logit computed, and say so.
        cramped = DeviceShard(*arguments, tier, device=device, capacity=1, largest_k=8)
        got, certificates = _decide(cramped, hidden[:3], size)
        assert _tokens(got) == _tokens(expected[:3])
        assert certificates[2].fallback
        assert certificates[2].guarantee == "dense"


# What a device can draw for itself: of each row the tokens are searched.
DRAWN = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.3, seed=3),
    SamplingParameters(temperature=0.9, top_k=8, seed=4),
    SamplingParameters(temperature=0.7, top_k=7, top_p=0.6, seed=5),
    SamplingParameters(temperature=1.5, top_k=8, top_p=0.95, min_p=0.2, seed=6),
    SamplingParameters(temperature=1.5, min_p=0.1, seed=7),
    SamplingParameters(temperature=1.2, min_p=0.02, top_p=0.8, seed=8),
    SamplingParameters(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParameters(temperature=1.0, presence_penalty=-1.0, min_tokens=9, seed=9),
    SamplingParameters(temperature=0.8, top_k=3, logit_bias=((7, 4.0), (9, -100.0)), seed=10),
    SamplingParameters(temperature=0.7, top_k=5, allowed_ids=tuple(range(299)), seed=11),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=12),
    SamplingParameters(temperature=1.4, top_p=0.6, seed=13),
)


def check_the_device_draws_what_the_host_decides(device: str) -> None:
    """Every kind of row, duplicate weights and ties between logits among them; where there is no
    room for the candidates, and where a row is not searched, it draws none."""
    from lexshard.actors.head.gpu import nucleus_rows
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    size, columns = 300, 48
    random = np.random.default_rng(12)
    values = np.round(random.standard_normal((size, columns)), 2).astype(np.float32)
    weight = torch.from_numpy(values[random.integers(0, size // 3, size)]).bfloat16()
    bias = torch.from_numpy(random.integers(0, 2, size).astype(np.float32))
    _, scale, softcap = HEADS[3]
    tier = quantize(weight, "int8")
    head = (weight, bias, None, scale, size, tier)
    shard = DeviceShard(*head, device=device, capacity=256, largest_k=8)
    states = [
        SequenceState(Request("r", 0, (1, 5, 7, 7), each, resumed_ids=(9, 5)), size, (2,))
        for each in DRAWN
    ]
    names = RowNames(tuple(range(len(states))))
    hidden = torch.from_numpy(random.standard_normal((len(states), columns))).float()
    with patch.object(nucleus_rows, "LOGITS_AT_ONCE", size):  # a row of top-p alone at a time
        thresholds = shard.screen(hidden, LooseStates(size, states).table(names))
    candidates = shard.rescore(thresholds)
    assert thresholds.drawn is not None
    assert candidates.drawn is not None
    decided = decide(candidates, states, size)
    drawn = [each and each.token_id for each in decided]
    assert thresholds.drawn.tolist() == candidates.drawn.tolist() == drawn
    # Of top-p alone the candidates are the nucleus.
    expected, _ = screen_and_decide(Shard(*head[:5]), hidden, states)
    assert _tokens(decided) == _tokens(expected)
    assert all(each.truncated for each in candidates.certificates[-2:])
    assert max(np.diff(candidates.offsets)[-2:]) < size / 2
    # Without room for the candidates, and with a soft-cap, the host draws, from all logits.
    cramped = DeviceShard(*head, device=device, capacity=1, largest_k=8)
    bent = DeviceShard(weight, bias, softcap, scale, size, tier, device=device, largest_k=8)
    asked = [Need("topk", k=5), Need("nucleus", top_p=0.9, inverse_temperature=0.2)]
    thresholds = cramped.screen(hidden[:2], RowTable.of(asked))
    assert thresholds.drawn is not None
    assert thresholds.drawn.tolist() == [-1, -1]
    assert all(each.fallback for each in cramped.rescore(thresholds).certificates)
    assert bent.screen(hidden[:2], RowTable.of(asked)).drawn is None
    mixed = RowTable.of([Need("top1"), Need("dense")])
    assert shard.screen(hidden[:2], mixed).drawn is None


NUCLEI = (
    SamplingParameters(temperature=0.7, top_p=0.9, seed=1),
    SamplingParameters(temperature=1.0, top_p=0.95, seed=2),
    SamplingParameters(temperature=0.5, top_p=0.999, seed=3),
    SamplingParameters(temperature=0.8, top_p=0.7, seed=4),
    SamplingParameters(temperature=0.6, top_p=0.95, seed=5, frequency_penalty=0.4),
)


def check_what_is_drawn_from_a_nucleus_is_what_all_logits_give(device: str) -> None:
    _check_draws_from_nuclei(device, 15, 64, None)


def check_nuclei_that_bounds_leave_are_found_as_far_as_there_is_room(device: str) -> None:
    _check_draws_from_nuclei(device, 30, 64, 30.0)
    _check_draws_from_nuclei(device, 40, 1, None)


def _check_draws_from_nuclei(device: str, rows: int, room: int, softcap: float | None) -> None:
    """Most rows are decided by bounds, of more than one tile; of the others those without a
    processor or a soft-cap on the device, as many as there is ``room`` for."""
    from lexshard.actors.head.gpu import device_shard

    size, columns = 1300, 48
    random = np.random.default_rng(5)
    weight = torch.from_numpy(random.standard_normal((size, columns))).bfloat16()
    hidden = torch.from_numpy(random.standard_normal((rows, columns)) * 0.6).float()
    bias = torch.from_numpy(random.integers(0, 2, size).astype(np.float32))
    states = [
        SequenceState(Request("r", 0, (1, 5, 7, 7), each, resumed_ids=(9, row)), size, (2,))
        for row, each in enumerate(NUCLEI * (rows // len(NUCLEI)))
    ]
    table = LooseStates(size, states).table(RowNames(tuple(range(rows))))
    plain = [row for row, each in enumerate(table.adjustments) if each is None]
    head = (weight, bias, softcap, 0.9, size)
    tier = quantize(weight, "int8")
    shard = device_shard.DeviceShard(*head, tier, device=device, capacity=600, largest_k=8)
    expected, _ = screen_and_decide(Shard(*head), hidden, states)
    with patch.object(device_shard, "uncertain_rows", lambda top_p: room):
        thresholds = shard.screen(hidden.to(device), table)
        found = shard.rescore(thresholds)
    assert _tokens(decide(found, states, size)) == _tokens(expected)
    assert thresholds.drawn is None  # there are processors
    certificates = found.certificates
    bounded = [row for row in range(rows) if certificates[row].tier == "int8"]
    assert len(bounded) > rows / 2
    assert any(row not in plain for row in bounded)
    left = [row for row in range(rows) if row not in bounded]
    assert all(certificates[row].fallback for row in left)
    on_device = [row for row in left if certificates[row].guarantee != "dense"]
    able = [row for row in left if row in plain and softcap is None]
    assert on_device == able[: room if room < len(able) else None]
    assert able or softcap is not None
    own = LooseStates(size, [states[row] for row in plain])
    thresholds = shard.screen(
        hidden[plain].to(device), own.table(RowNames(tuple(range(len(plain)))))
    )
    drawn = shard.rescore(thresholds).drawn
    if softcap is not None:
        assert thresholds.drawn is None
        assert drawn is None
        return
    assert thresholds.drawn is not None
    assert drawn is not None
    assert thresholds.drawn.tolist() == drawn.tolist()
    assert drawn.tolist() == [each.token_id for row in plain if (each := expected[row])]


def check_a_token_that_only_the_device_knows_is_counted(device: str) -> None:
    """Penalised rows that have seen one token more than they say are those that say so: wherever
    it comes among the others, seen before or not, biased or not; of more than one tile, too."""
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    size = 2500
    random = np.random.default_rng(21)
    weight = torch.from_numpy(random.standard_normal((size, 16))).bfloat16()
    tier = quantize(weight, "int8")
    shard = DeviceShard(weight, None, None, 1.0, size, tier, device=device, largest_k=8)
    kinds = (
        SamplingParameters(temperature=0.0, repetition_penalty=3.0, logit_bias=((40, 2.5),)),
        SamplingParameters(temperature=0.0, frequency_penalty=1.1, presence_penalty=2.0),
        SamplingParameters(temperature=0.9, top_k=6, presence_penalty=-4.0, seed=3),
        SamplingParameters(temperature=0.9, repetition_penalty=1.4, frequency_penalty=-0.3, seed=4),
    )
    # Prompt, output, and what is drawn then: of few tokens, and of so many that they take two
    # tiles.
    many = tuple(random.permutation(size)[:1500].tolist())
    texts = (
        ((30, 50), (60, 60), (7, 30, 40, 60, 2400)),
        (many[:700], many[700:], (many[3], min(set(range(size)) - set(many)), size - 1)),
    )
    cases = [
        (kind, prompt, output, token_id)
        for prompt, output, drawn in texts
        for kind in kinds
        for token_id in drawn
    ]
    tokens = torch.tensor([case[-1] for case in cases], dtype=torch.int32)
    hidden = torch.from_numpy(random.standard_normal((len(cases), 16))).float()
    # The token is as good as the best, so that its penalty decides.
    hidden += 2 * weight.float()[tokens.long()]

    def screened(before: torch.Tensor | None) -> tuple[list[int], Candidates]:
        states = []
        for kind, prompt, output, token_id in cases:
            known = (*output, token_id) if before is None else output
            request = Request("r", 0, prompt, kind, resumed_ids=known)
            states.append(SequenceState(request, size, (2,)))
        names = RowNames(tuple(range(len(states))), unknown=int(before is not None))
        thresholds = shard.screen(hidden, LooseStates(size, states).table(names), before)
        assert thresholds.drawn is not None
        return thresholds.drawn.tolist(), shard.rescore(thresholds)

    known, expected = screened(None)
    ours, found = screened(tokens.to(device))
    forgotten, _ = screened(torch.full_like(tokens, -1).to(device))
    assert ours == known
    assert forgotten != known
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.ids.tolist() == expected.ids.tolist()


def check_hidden_states_that_are_not_finite_are_named(device: str) -> None:
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    weight = torch.randn(70, 16, generator=torch.Generator().manual_seed(2))
    tier = quantize(weight, "int8")
    shard = DeviceShard(weight, None, None, 1.0, 70, tier, device=device)
    hidden = torch.ones(3, 16)
    hidden[1, 3] = float("nan")
    hidden[2, 5] = float("inf")
    for states in (hidden, hidden.to(device)):
        with pytest.raises(NonFiniteHiddenError) as caught:
            shard.rescore(shard.screen(states, RowTable.of([Need("top1")] * 3)))
        assert caught.value.rows == (1, 2)


def check_shards_of_any_tokens_draw_the_tokens_of_one(device: str) -> None:
    """Blocks in any order, or tokens at random: noise and processors go by the vocabulary's ids."""
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    generator = torch.Generator().manual_seed(4)
    size, rows = 300, len(PARAMETERS)
    weight = torch.randn(size, 48, generator=generator).bfloat16()
    hidden = torch.randn(rows, 48, generator=generator).numpy()
    expected, _ = _decide(Shard(weight, None, None, 1.0, size), hidden, size)
    owner = np.random.default_rng(1).integers(0, 2, size)
    by_blocks = [OwnedRows.of_blocks(blocks, size) for blocks in ([4, 1], [0, 3, 2])]
    by_tokens = [OwnedRows.of_tokens(np.flatnonzero(owner == part), size) for part in range(2)]
    for split in (by_blocks, by_tokens):
        shards = []
        for owned in split:
            own = weight[torch.from_numpy(owned.ids).long()]
            tier = quantize(own, "int8")
            shards.append(
                DeviceShard(
                    own, None, None, 1.0, size, tier, device=device, largest_k=8, owned=owned
                )
            )
        group = ShardGroup(shards, [owned.ids for owned in split])
        got, certificates = _decide(group, hidden, size)
        assert _tokens(got) == _tokens(expected)
        assert sum(each.guarantee == "deterministic" for each in certificates) >= 6


def check_thresholds_of_many_rows_are_those_of_each(device: str) -> None:
    """Two launches of one size share their buffers; what the first has found must not be lost."""
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(90, 16, generator=generator)
    tier = quantize(weight, "int8")
    shard = DeviceShard(weight, None, None, 1.0, 90, tier, device=device)
    hidden = torch.randn(128, 16, generator=generator)
    needs = [Need("top1")] * 127 + [Need("dense")]
    tau = shard.screen(hidden, RowTable.of(needs)).tau.cpu().numpy()
    best = canonical_logits(hidden.numpy(), weight).max(axis=1)
    assert tau[:127].tolist() == best[:127].astype(np.float64).tolist()
    assert np.isnan(tau[127])


QUICK_CHECKS = (
    check_the_shard_draws_the_tokens_of_the_cpu,
    check_the_device_draws_what_the_host_decides,
    check_what_is_drawn_from_a_nucleus_is_what_all_logits_give,
    check_hidden_states_that_are_not_finite_are_named,
    check_a_wrong_slack_is_noticed,
    check_too_many_candidates_are_counted,
    check_the_threshold_is_the_answer_itself,
)
LONG_CHECKS = (
    check_a_token_that_only_the_device_knows_is_counted,
    check_shards_of_any_tokens_draw_the_tokens_of_one,
    check_thresholds_of_many_rows_are_those_of_each,
    check_nuclei_that_bounds_leave_are_found_as_far_as_there_is_room,
    check_no_answer_is_lost,
)
CHECKS = (*QUICK_CHECKS, *LONG_CHECKS)


@pytest.mark.parametrize("part", ["QUICK", pytest.param("LONG", marks=pytest.mark.slow)])
def test_the_search_keeps_its_promises_in_the_interpreter(part: str) -> None:
    program = (
        "from tests.kernels import test_device_search as checks\n"
        f"for check in checks.{part}_CHECKS: check('cpu')\n"
    )
    interpret(program)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_search_keeps_its_promises_on_the_gpu(check: object) -> None:
    check("cuda")  # type: ignore[operator]


COMPILE = """
from dataclasses import replace
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tests.support.compile_only import check, compiling
from lexshard.actors.head.gpu.device_shard import DeviceShard
from lexshard.actors.states.need import Need
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import UNADJUSTED, RowTable
from lexshard.kernels.quantize import quantize
from lexshard.kernels.rows.triton_kernel import canonical_logits
weight = torch.randn(1300, 256).bfloat16()
tier = quantize(weight, "int8")
operators = set()
class Recorded(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        operators.add(operator.overloadpacket.__name__)
        return operator(*arguments, **(options or {}))
with compiling() as compiled:
    plain = DeviceShard(weight, None, None, 1.0, 1300, tier, device="cpu")
    plain.screen(torch.zeros(1, 256), RowTable.of([Need("top1")]))
    shard = DeviceShard(weight, torch.zeros(1300), 30.0, 0.5, 1300, tier, device="cpu")
    masked = Need("top1", adjustment=replace(UNADJUSTED, mask=Mask.of_ids(range(600), 1300)))
    shard.screen(torch.zeros(64, 256), RowTable.of([Need("top1"), masked] * 32))
    canonical_logits(torch.zeros(2, 256), weight)
check(compiled)
assert len({kernel.name for kernel in compiled}) >= 12
with compiling() as compiled, Recorded():
    plain.replay(1)()
print(*(kernel.name for kernel in compiled))
assert len(compiled) == 11, "begin, which is beside the screen, the screen's two, and eight"
assert operators <= {"empty", "view", "select", "detach"}, operators  # which launch nothing
"""


def test_a_step_of_the_head_is_eleven_launches_that_compile_for_a_gpu() -> None:
    """Down to machine code for compute capability 9.0, without a device. Where nothing is penalised
    or post-processed a graph holds nothing but these launches."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_draw_the_tokens_of_the_cpu() -> None:
    """Many steps of changing sizes and needs, also larger than any graph, from either memory."""
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    generator = torch.Generator().manual_seed(3)
    size, columns = 5000, 256
    weight = torch.randn(size, columns, generator=generator).bfloat16() / 16
    expected = Shard(weight, None, None, 1.0, size)
    ours = DeviceShard(weight, None, None, 1.0, size, quantize(weight, "int8"))
    for step, rows in enumerate((1, 3, 64, 2, 100, 7, 1)):
        hidden = 8 * torch.randn(rows, columns, generator=generator)
        where = hidden.cuda() if step % 2 else hidden
        got, _ = _decide(ours, where, size)
        assert _tokens(got) == _tokens(_decide(expected, hidden.numpy(), size)[0])
