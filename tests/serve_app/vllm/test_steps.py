"""Steps without vLLM: requests are followed, guesses stand or fall, logits are made when read."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from lexshard.actors.collective import Rounds
from lexshard.serve_app.vllm import deferred as deferral
from lexshard.serve_app.vllm import runners, tally
from lexshard.serve_app.vllm.deferred import Answer, AskedRequest, DeferredLogits
from lexshard.serve_app.vllm.head import PluginHead, SharedHead, head_refusal
from lexshard.serve_app.vllm.runners import batch_refusal, mask_rows, mask_words
from lexshard.serve_app.vllm.steps import CertifiedSteps, request_refusal
from lexshard.serve_app.vllm.tally import TALLY, TOLD_EVERY, Tally
from tests.support.paths import ROOT

SIZE, COLUMNS = 500, 32
RAW = "raw_logprobs"


def parameters(**changed: Any) -> SimpleNamespace:
    """Those of vLLM, as far as they are looked at."""
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "bad_words_token_ids": None,
        "allowed_token_ids": None,
        "min_tokens": 0,
        "all_stop_token_ids": set(),
        "logprobs": None,
        "logprob_token_ids": None,
        "thinking_token_budget": None,
        "trace_decode_token_ids": None,
        "structured_outputs": None,
        "seed": 3,
    }
    return SimpleNamespace(**{**defaults, **changed})


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(SIZE, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def head(weight: torch.Tensor) -> PluginHead:
    return PluginHead(weight, None, None, 1.0, SIZE)


@pytest.fixture
def steps(head: PluginHead, weight: torch.Tensor) -> Iterator[CertifiedSteps]:
    made = CertifiedSteps(head, RAW)
    yield made
    end(made, weight)


def hidden_states(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def deferred(steps: CertifiedSteps, hidden: torch.Tensor, weight: torch.Tensor) -> DeferredLogits:
    return DeferredLogits.of(steps, hidden, SIZE, lambda: hidden @ weight.T, dtype=torch.float32)


def end(steps: CertifiedSteps, weight: torch.Tensor) -> None:
    """No request is running any more."""
    steps.decide(deferred(steps, hidden_states(1), weight), [], [])


def asked(
    own: Any,
    tokens: Sequence[int] = (5, 6, 7),
    drafts: tuple[int, ...] = (),
    *,
    name: str = "one",
    first: int = 0,
    prompt: int = 2,
) -> AskedRequest:
    known = list(tokens)
    return AskedRequest(
        name, own, prompt, len(known), first, drafts, lambda begin, end: known[begin:end]
    )


def test_a_greedy_row_is_the_best_token_and_no_logits_are_made(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    hidden = hidden_states(2)
    logits = DeferredLogits.of(steps, hidden, SIZE, pytest.fail, dtype=torch.float32)
    own = parameters()
    requests = [asked(own), asked(own, name="two", first=1)]
    found = steps.decide(logits, requests, ["one", "two"])
    best = (hidden @ weight.T).argmax(dim=1).tolist()
    assert [answer and answer[0].token_id for answer in found] == best
    assert (logits.shape, logits.dtype) == ((2, SIZE), torch.float32)


def test_a_seed_draws_the_same_alone_drafted_and_after_it_was_taken_back(
    head: PluginHead, weight: torch.Tensor
) -> None:
    own = parameters(temperature=1.0, repetition_penalty=1.2, top_k=40)
    hidden = hidden_states(4, seed=2)
    one_by_one: list[int] = []
    alone = CertifiedSteps(head, RAW)
    for row in range(4):
        logits = deferred(alone, hidden[row : row + 1], weight)
        [answer] = alone.decide(logits, [asked(own, [5, 6, *one_by_one])], ["one"])
        assert answer is not None
        one_by_one.append(answer[0].token_id)
    end(alone, weight)
    steps = CertifiedSteps(head, RAW)
    guesses = (*one_by_one[:2], (one_by_one[2] + 1) % SIZE)  # the third is wrong
    [answer] = steps.decide(deferred(steps, hidden, weight), [asked(own, [5, 6], guesses)], ["one"])
    assert answer is not None
    assert [each.token_id for each in answer] == one_by_one[:3]
    # What it drew need not be told; two of it are taken back.
    unknown = [5, 6, *[-1] * 3]
    [answer] = steps.decide(deferred(steps, hidden[3:], weight), [asked(own, unknown)], ["one"])
    assert answer is not None
    assert answer[0].token_id == one_by_one[3]
    back = asked(own, [5, 6, one_by_one[0]])
    [answer] = steps.decide(deferred(steps, hidden[1:2], weight), [back], ["one"])
    assert answer is not None
    assert answer[0].token_id == one_by_one[1]
    end(steps, weight)


def test_what_cannot_be_followed_is_left_and_counted(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    logits = deferred(steps, hidden_states(5), weight)
    budget = parameters(thinking_token_budget=5)
    requests = [
        asked(budget),
        asked(parameters(), [5, -1], name="two", first=1),
        asked(parameters(allowed_token_ids=[]), name="three", first=2),
        asked(parameters(), name="four", first=3),
        asked(parameters(repetition_penalty=1e-46), name="five", first=4),  # fp32 has it not
    ]
    before = TALLY.refused.copy()
    found = steps.decide(logits, requests, ["one", "two", "three", "four", "five"])
    assert [answer is None for answer in found] == [True, True, True, False, True]
    assert dict(TALLY.refused - before) == {
        "a budget of thinking tokens": 1,
        "requests whose last tokens are not known yet": 1,
        "rows that no token is left for": 1,
        "repetition_penalty 1e-46 is out of range: 1 is none": 1,
    }


def test_counts_are_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(tally, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counts = Tally()
    caplog.set_level(logging.INFO, "vllm.lexshard")
    for seconds in (0.0, TOLD_EVERY - 1, 2.0, 5.0):
        now[0] += seconds
        counts.certified += 1
        counts.tell_if_due()
    told = [each.getMessage() for each in caplog.records]
    assert told == ["lexshard: 3 rows certified"]


COUNTING = """
import logging, multiprocessing, sys
from lexshard.serve_app.vllm.tally import TALLY
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def engine():
    TALLY.refuse("guesses", 2)
engine() if {method!r} == "this" else None
if {method!r} == "fork":
    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("method", ["this", "fork"])
def test_the_end_of_an_engine_tells_its_counts_once(method: str) -> None:
    command = [sys.executable, "-c", COUNTING.format(method=method)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [
        "lexshard leaves to vLLM: guesses",
        "lexshard: 0 rows certified; 2 left to vLLM: guesses",
    ]


def test_hidden_states_that_are_not_finite_leave_their_own_requests_alone(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    hidden, names = hidden_states(3), ["one", "two", "three"]
    best = (hidden @ weight.T).argmax(dim=1).tolist()
    requests = [asked(parameters(), name=name, first=row) for row, name in enumerate(names)]
    before = TALLY.refused.copy()
    hidden[1, 3] = torch.nan
    found = steps.decide(deferred(steps, hidden, weight), requests, names)
    assert [answer and answer[0].token_id for answer in found] == [best[0], None, best[2]]
    assert dict(TALLY.refused - before) == {"rows with hidden states that are not finite": 1}
    hidden[:, 3] = torch.inf
    assert steps.decide(deferred(steps, hidden, weight), requests, names) == [None] * 3


def test_a_grammars_mask_and_allowed_tokens_hold_together(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    hidden = hidden_states(1)
    logits = deferred(steps, hidden, weight)
    packed = np.zeros(-(-SIZE // 32), np.uint32)
    for token in range(100, 200):
        packed[token // 32] |= np.uint32(1 << token % 32)
    words = mask_words(packed.view(np.int32), SIZE)
    logits.constrain({0: words}, lambda dense: dense[:, :100].fill_(-torch.inf))
    own = parameters(allowed_token_ids=list(range(150, 300)))
    [answer] = steps.decide(logits, [asked(own)], ["one"])
    assert answer is not None
    assert answer[0].token_id == 150 + int((hidden @ weight.T)[0, 150:200].argmax())
    assert int(logits.argmin()) < 100  # what is read is masked, too


def test_every_operation_reads_the_logits_once(steps: CertifiedSteps, weight: torch.Tensor) -> None:
    made: list[torch.Tensor] = []

    def compute() -> torch.Tensor:
        made.append(hidden_states(2) @ weight.T)
        return made[-1]

    logits = DeferredLogits.of(steps, hidden_states(2), SIZE, compute, dtype=torch.float32)
    assert (len(made), logits.is_cpu) == (0, True)
    assert torch.equal(logits.softmax(dim=1), made[0].softmax(dim=1))
    logits.fill_(1.0)
    assert float(torch.cat([logits, logits]).sum()) == 4 * SIZE
    assert len(made) == 1
    with deferral.deferring():
        assert deferral.is_deferring()
    assert not deferral.is_deferring()


def test_logits_that_a_model_has_changed_are_not_ignored(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    logits = deferred(steps, hidden_states(1), weight)
    logits[:, 7] = 1e4
    assert steps.decide(logits, [asked(parameters())], ["one"]) == [None]
    assert int(logits.dense().argmax()) == 7


def test_words_beyond_the_vocabulary_are_no_tokens() -> None:
    every = np.full(16, -1, np.int32)
    assert [int(each).bit_count() for each in mask_words(every, 70)] == [64, 6]
    assert [int(each).bit_count() for each in mask_words(every[:2], 128)] == [64, 0]


def test_masks_are_found_however_many_rows_vllm_gives_a_request() -> None:
    names, guesses = ["a", "b", "c"], {"b": [7, 8], "d": [9]}
    own = {("a", 0): 0, ("b", 0): 1, ("b", 1): 2, ("b", 2): 3, ("c", 0): 4}
    assert mask_rows(names, guesses, 5) == own  # vLLM 0.32
    same = {("a", 0): 0, ("b", 0): 4, ("b", 1): 5, ("b", 2): 6, ("c", 0): 8}
    assert mask_rows(names, guesses, 12) == same  # 0.33, of at most three guesses
    assert mask_rows(names, {}, 3) == {("a", 0): 0, ("b", 0): 1, ("c", 0): 2}
    assert mask_rows(names, {}, 9) == {("a", 0): 0, ("b", 0): 3, ("c", 0): 6}
    for rows in (3, 4, 6, 7):
        with pytest.raises(ValueError, match=f"a bitmask of {rows} rows"):
            mask_rows(names, guesses, rows)


def test_answers_fill_the_rows_of_their_requests(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    hidden = hidden_states(3)
    own = parameters(logprobs=2)
    best = (hidden @ weight.T).log_softmax(dim=1)
    guess = int(best[0].argmax())
    requests = [asked(own, drafts=(guess,)), asked(parameters(), name="two", first=2)]
    found = steps.decide(deferred(steps, hidden, weight), requests, ["one", "two"])
    tokens = torch.full((3, 2), -1)
    scores = torch.zeros((6, 4), dtype=torch.int32), torch.zeros((6, 4)), torch.zeros(6)
    runners.as_tensors([None, *found], tokens, *scores)
    first, second, third = best.argmax(dim=1).tolist()
    assert tokens.tolist() == [[-1, -1], [first, second], [third, -1]]
    values, ids = best.topk(2)
    assert scores[0][2].tolist() == [first, *ids[0].tolist(), 0]
    best_values = values[1].tolist()
    assert scores[1][3, :3].tolist() == pytest.approx([best_values[0], *best_values])
    assert scores[2].tolist() == [0, 0, 1, 1, 0, 0]


class Scores(NamedTuple):
    """vLLM's log-probabilities."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
    counts: None = None


def first_runner(*own: Any) -> SimpleNamespace:
    """vLLM's first runner, as far as it is looked at, with requests that have three tokens."""
    count, names = len(own), [f"request {place}" for place in range(len(own))]
    generators = dict(enumerate(f"generator {place}" for place in range(count)))
    batch = SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        num_reqs=count,
        num_prompt_tokens=np.full(count, 2),
        token_ids_cpu=np.arange(3 * count).reshape(count, 3),
        is_token_ids=np.ones((count, 3), np.bool_),
        generators=generators,
        logitsprocs=SimpleNamespace(all=()),
        update_async_output_token_ids=lambda: None,
    )
    known = zip(names, own, generators.copy().values(), strict=True)
    return SimpleNamespace(
        input_batch=batch,
        requests={n: SimpleNamespace(sampling_params=p, generator=g) for n, p, g in known},
        query_start_loc=SimpleNamespace(gpu=torch.arange(count + 1)),
        positions=torch.full((count,), 2),
        discard_request_mask=SimpleNamespace(np=np.zeros(count, np.bool_)),
    )


def test_tokens_that_one_request_names_take_no_log_probabilities_from_another(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    """vLLM has columns for the named tokens alone then, in every row."""
    hidden = hidden_states(2)
    ids, values = torch.tensor([[7, 0, 0], [8, 5, 6]]), torch.full((2, 3), -2.0)

    def own(*_: Any) -> SimpleNamespace:
        drawn = torch.tensor([[7], [8]])
        return SimpleNamespace(
            sampled_token_ids=drawn, logprobs_tensors=Scores(ids, values, torch.ones(2))
        )

    runner = first_runner(parameters(logprobs=5), parameters(logprob_token_ids=[5, 6]))
    output = runners._sample_first(own, runner, deferred(steps, hidden, weight), None)
    best, tokens = (each[0].tolist() for each in (hidden @ weight.T).log_softmax(dim=1).topk(5))
    assert output.sampled_token_ids.tolist() == [[tokens[0]], [8]]
    scores = output.logprobs_tensors
    assert scores.ids.tolist() == [[tokens[0], *tokens], [8, 5, 6, 0, 0, 0]]
    assert scores.values[0].tolist() == pytest.approx([best[0], *best], abs=1e-5)
    assert scores.values[1].tolist() == [-2.0] * 3 + [-torch.inf] * 3


def test_what_is_left_to_vllm_draws_by_its_own_generator(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    budget, tiny = parameters(thinking_token_budget=5), parameters(repetition_penalty=1e-46)
    runner = first_runner(parameters(), budget, tiny, parameters())
    hidden, amid = hidden_states(4), runner.discard_request_mask.np
    drawn_by: list[dict[int, str]] = []

    def own(*_: Any) -> SimpleNamespace:
        drawn_by.append(dict(runner.input_batch.generators))
        return SimpleNamespace(sampled_token_ids=torch.zeros(4, 1), logprobs_tensors=None)

    amid[:] = False, True, False, True  # vLLM would take back from theirs what they did not draw
    runners._sample_first(own, runner, deferred(steps, hidden, weight), None)
    amid[:] = False
    hidden[3, 3] = torch.nan
    runners._sample_first(own, runner, deferred(steps, hidden, weight), None)
    left = {place: f"generator {place}" for place in (1, 2, 3)}
    assert drawn_by == [{2: "generator 2"}, left]


def test_nothing_is_kept_of_requests_that_are_gone(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    for name in ("a", "b", "c"):
        logits = deferred(steps, hidden_states(1), weight)
        steps.decide(logits, [asked(parameters(), name=name)], [name])
        assert len(steps.head.states) <= 2  # the one before, until the next step
    end(steps, weight)
    assert len(steps.head.states) == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"logprobs": -1}, "whole vocabulary"),
        ({"logprob_token_ids": [4]}, "named tokens"),
        ({"structured_outputs": object(), "min_tokens": 2}, "min_tokens"),
        ({}, None),
    ],
)
def test_requests_that_are_left_to_vllm_have_a_reason(
    changed: dict[str, Any], reason: str | None
) -> None:
    found = request_refusal(parameters(**changed), RAW)
    assert found is None if reason is None else reason in str(found)


def test_heads_that_are_left_to_vllm_have_a_reason(weight: torch.Tensor) -> None:
    def refusal(
        tp_size: int = 1, added: int = 0, values: torch.Tensor = weight, **changed: Any
    ) -> str | None:
        settings = {
            "logits_as_input": False,
            "soft_cap": None,
            "scale": 1.0,
            "org_vocab_size": SIZE,
        }
        method = type("UnquantizedEmbeddingMethod", (), {})()
        layer = SimpleNamespace(
            weight=values, quant_method=method, tp_size=tp_size, num_added_embeddings=added
        )
        return head_refusal(SimpleNamespace(**{**settings, **changed}), layer, None)

    assert refusal() is None
    assert refusal(tp_size=2, values=weight[: SIZE // 2]) is None
    assert "fewer" in str(refusal(tp_size=2, values=weight[: SIZE // 2 - 1]))
    assert "tensor-parallel" in str(refusal(tp_size=2, added=3))
    assert "type" in str(refusal(values=weight.half()))
    assert "soft cap" in str(refusal(soft_cap=30.0, scale=0.5))
    assert "fewer" in str(refusal(org_vocab_size=SIZE + 1))


def test_a_soft_cap_and_a_scale_are_vllms(weight: torch.Tensor) -> None:
    hidden = hidden_states(1)
    logits = hidden @ weight.T
    for cap, scale, expected in (
        (5.0, 1.0, 5.0 * torch.tanh(logits / 5.0)),
        (None, 0.25, logits * 0.25),
    ):
        steps = CertifiedSteps(PluginHead(weight, None, cap, scale, SIZE), RAW)
        own = parameters(logprobs=3)
        [answer] = steps.decide(deferred(steps, hidden, weight), [asked(own)], ["one"])
        assert answer is not None
        assert answer[0].logprobs is not None
        values, ids = expected.log_softmax(dim=1).topk(3)
        assert [i for i, _ in answer[0].logprobs.top] == ids[0].tolist()
        assert [p for _, p in answer[0].logprobs.top] == pytest.approx(values[0].tolist(), abs=1e-5)


def test_weights_that_change_are_noticed(weight: torch.Tensor) -> None:
    own = weight.clone()
    head = PluginHead(own, None, None, 1.0, SIZE)
    assert head.is_current()
    own.data.mul_(1.01)
    assert not head.is_current()


def test_the_second_runners_sampler_draws_certified_rows(
    steps: CertifiedSteps, weight: torch.Tensor
) -> None:
    hidden = hidden_states(3)
    lengths = SimpleNamespace(np=np.array([3, 9, 3]))
    states = SimpleNamespace(
        prefill_len=lengths,
        prompt_len=lengths,
        index_to_req_id={0: "a", 1: "b", 2: "c"},
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        all_token_ids=SimpleNamespace(gpu=torch.arange(30).reshape(3, 10)),
    )
    known = {0: parameters(), 1: parameters(), 2: parameters(thinking_token_budget=1)}
    sampler = SimpleNamespace(req_states=states, lexshard_parameters=known)
    own_calls: list[torch.Tensor] = []

    def own(_: Any, dense: torch.Tensor, *rest: Any, **named: Any) -> Any:
        own_calls.append(dense)
        return torch.tensor([400, 401, 402]), dense

    sample = partial(runners.sample_second, own)
    places, before = np.array([0, 1, 2]), torch.tensor([2, 4, 2])
    logits = deferred(steps, hidden, weight)
    drawn, _ = sample(sampler, logits, None, None, places, before)
    best = int((hidden @ weight.T)[0].argmax())
    # One amid its prompt and one that is left to vLLM keep what vLLM drew.
    assert drawn.tolist() == [best, 401, 402]
    assert len(own_calls) == 1
    known[2] = parameters()
    drawn, _ = sample(sampler, deferred(steps, hidden, weight), None, None, places, before)
    assert (drawn[0].item(), len(own_calls)) == (best, 1)


def test_the_second_runner_leaves_batches_whose_logits_are_read() -> None:
    processors = [type(name, (), {})() for name in sorted(runners.SECOND_BUILT_IN)]

    class Sampler(SimpleNamespace):
        """vLLM's own, as far as it is looked at."""

    class GPUWatermarkSampler(Sampler):
        """As vLLM's: it draws otherwise with all that it inherits."""

    own: dict[str, Any] = {
        "get_logprobs_dims": lambda places: None,
        "logits_processors": processors,
        "compute_nans": False,
        "return_sampling_mask": False,
    }
    sampler = Sampler(**own)
    batch = SimpleNamespace(
        num_draft_tokens=0, num_draft_tokens_per_req=None, idx_mapping_np=np.arange(2)
    )
    assert batch_refusal(sampler, batch) is None
    for other in (GPUWatermarkSampler(**own), object()):  # a model's own may have nothing of it
        assert f"the sampler {type(other).__name__} " in str(batch_refusal(other, batch))
    batch.num_draft_tokens_per_req = np.array([0, 2])
    assert "guesses" in str(batch_refusal(sampler, batch))
    batch.num_draft_tokens_per_req = np.zeros(2)
    assert batch_refusal(sampler, batch) is None
    processors.append(object())
    assert "processors" in str(batch_refusal(sampler, batch))
    sampler.get_logprobs_dims = lambda places: (3, 0)
    assert "log-probabilities" in str(batch_refusal(sampler, batch))
    batch.num_draft_tokens = 2
    assert "guesses" in str(batch_refusal(sampler, batch))


Told = TypeVar("Told")
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3, "bad_words_token_ids": [[7]]},
    {"temperature": 1.0, "allowed_token_ids": [1, 150, 200, 290], "logit_bias": {200: 1.0}},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 2, "presence_penalty": 0.4},  # with a grammar
    {"temperature": 1.0, "top_p": 0.9},  # with guesses
]
GRAMMAR = len(KINDS) - 2


def on_ranks(ranks: int, work: Callable[[Rounds], Told]) -> list[Told]:
    """What ``work`` says on each of so many ranks, which are threads."""
    from tests.support.thread_shards import thread_group  # a bare CUDA machine has no msgspec

    with ThreadPoolExecutor(ranks) as threads:
        return [each.result() for each in [threads.submit(work, r) for r in thread_group(ranks)]]


def parts_of(values: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """As vLLM cuts them: the same number for each rank, with padding."""
    padded = values.new_zeros(-(-len(values) // 64) * 64, *values.shape[1:])
    padded[: len(values)] = values
    return padded.chunk(ranks)


def texts(head: PluginHead, weight: torch.Tensor) -> list[list[Answer | None]]:
    """What three steps of a request of every kind say, those in the middle without a seed."""
    steps = CertifiedSteps(head, RAW, Random(4))
    own = [parameters(**each, seed=None if 2 < i < 6 else i) for i, each in enumerate(KINDS)]
    tokens = [[5, 6, 7] for _ in own]
    said = []
    for turn in range(3):
        hidden = hidden_states(len(own) + 2, seed=turn)
        logits = deferred(steps, hidden, weight)
        words = np.array([0xFF0, *[0] * (head.vocabulary_size // 64 - 1), 0x3], np.uint64)
        logits.constrain({GRAMMAR: words}, pytest.fail)
        requests = [asked(each, tokens[i], name=str(i), first=i) for i, each in enumerate(own[:-1])]
        requests.append(asked(own[-1], tokens[-1], (3, 4), name="drafted", first=len(own) - 1))
        found = steps.decide(logits, requests, [each.request_id for each in requests])
        for each, answer in zip(tokens, found, strict=True):
            assert answer is not None
            each.extend(decision.token_id for decision in answer)
        said.append(found)
    end(steps, weight)
    return said


@pytest.mark.parametrize(
    ("size", "ranks", "biased", "dtype"),
    [
        (500, 2, False, torch.float32),
        (300, 2, True, torch.float32),
        (300, 4, False, torch.bfloat16),
    ],
)
def test_ranks_with_a_part_of_the_head_each_say_what_one_with_all_of_it_says(
    size: int, ranks: int, biased: bool, dtype: torch.dtype, weight: torch.Tensor
) -> None:
    """Of 300 tokens, parts begin in the midst of a block."""
    own = weight[:size].to(dtype)
    bias = hidden_states(size, seed=9)[:, 0].contiguous() if biased else None
    parts = parts_of(own, ranks)
    biases = [None] * ranks if bias is None else parts_of(bias, ranks)

    def rank(group: Rounds) -> list[list[Answer | None]]:
        each = parts[group.rank], biases[group.rank]
        return texts(SharedHead(*each, None, 1.0, size, group), own)

    alone = texts(PluginHead(own, bias, None, 1.0, size), own)
    assert on_ranks(ranks, rank) == [alone] * ranks
    for turn, answers in enumerate(alone):
        logits = hidden_states(1, seed=turn) @ own.float().T + (0.0 if bias is None else bias)
        assert answers[0] is not None
        assert answers[0][0].token_id == int(logits.argmax())


def test_what_one_rank_cannot_certify_every_rank_leaves_to_vllm(weight: torch.Tensor) -> None:
    parts = [part.clone() for part in parts_of(weight, 2)]

    def rank(group: Rounds) -> None:
        own, last = parts[group.rank], group.rank == group.size - 1
        with pytest.raises(ValueError, match="at least one block"):
            SharedHead(own[:32], None, None, 1.0, 60, group)
        damaged = torch.full_like(own, torch.nan) if last else own
        with pytest.raises(ValueError, match="of a rank contain NaN"):
            SharedHead(damaged, None, None, 1.0, SIZE, group)
        head = SharedHead(own, None, None, 1.0, SIZE, group)
        hidden, names = hidden_states(3), ["one", "two", "three"]
        best = int((hidden @ weight.T)[1].argmax())
        hidden[0 if last else 2, 3] = torch.nan
        steps = CertifiedSteps(head, RAW)
        requests = [asked(parameters(), name=name, first=row) for row, name in enumerate(names)]
        found = steps.decide(deferred(steps, hidden, weight), requests, names)
        assert [answer and answer[0].token_id for answer in found] == [None, best, None]
        assert head.is_current()
        if last:
            own.mul_(1.01)
        assert not head.is_current()

    on_ranks(2, rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_tokens_are_the_same(head: PluginHead, weight: torch.Tensor) -> None:
    hidden = hidden_states(4)
    there = PluginHead(weight.cuda(), None, None, 1.0, SIZE)
    own = [parameters(), parameters(temperature=1.0), parameters(temperature=1.0, top_k=9)]
    own.append(parameters(temperature=0.7, top_p=0.8, logprobs=2))
    tokens = []
    for each, states in ((head, hidden), (there, hidden.cuda())):
        steps = CertifiedSteps(each, RAW)
        logits = deferred(steps, states, weight)
        requests = [asked(p, name=str(i), first=i) for i, p in enumerate(own)]
        found = steps.decide(logits, requests, list("0123"))
        tokens.append([answer and answer[0].token_id for answer in found])
    assert tokens[0] == tokens[1]
