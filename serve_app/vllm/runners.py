"""vLLM's model runners, certified: the first (``v1/worker/gpu_model_runner.py``, also for CPUs) and
the second (``v1/worker/gpu/model_runner.py``), where batches with guesses, and those whose logits
something of vLLM reads, are vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from lexshard.serve_app.vllm.deferred import Answer, AskedRequest, DeferredLogits, Words, deferring
from lexshard.serve_app.vllm.tally import TALLY, logger

Function = Callable[..., Any]  # one of vLLM's
# Logits processors of vLLM's that ask what the head does, too.
FIRST_BUILT_IN = {"MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"}
SECOND_BUILT_IN = {"LogitBiasState", "PenaltiesState", "BadWordsState"}


def install() -> None:
    """Makes both runners ask for deferred logits, and decide them."""
    from vllm.v1.worker import gpu_model_runner as first
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    for runner in (first.GPUModelRunner, CPUModelRunner, SecondRunner):
        _replace(runner, "load_model", _make_ready)
    first.GPUModelRunner.execute_model = deferring()(first.GPUModelRunner.execute_model)
    _replace(first.GPUModelRunner, "_sample", _sample_first)
    _replace(first, "apply_grammar_bitmask", _note_masks_first)
    _replace(SecondRunner, "sample", _defer_second)
    _replace(Sampler, "add_request", _remember)
    _replace(Sampler, "sample", sample_second)
    _replace(StructuredOutputsWorker, "apply_grammar_bitmask", _note_masks_second)


def _replace(owner: Any, name: str, instead: Function) -> None:
    """Puts ``instead`` in the place of a function of vLLM, which it gets before the arguments."""
    own = getattr(owner, name)
    setattr(owner, name, wraps(own)(lambda *args, **kwargs: instead(own, *args, **kwargs)))


def _make_ready(load_model: Function, runner: Any, *args: Any, **kwargs: Any) -> None:
    """``load_model``, after which no request waits for the head to be made."""
    load_model(runner, *args, **kwargs)
    configuration = runner.model_config
    stages = runner.vllm_config.parallel_config.pipeline_parallel_size > 1
    if stages or runner.lora_config or configuration.runner_type == "pooling":
        return
    shape = 1, configuration.get_hidden_size()
    try:
        with deferring(), torch.inference_mode():
            hidden = torch.zeros(shape, dtype=configuration.dtype, device=runner.device)
            runner.model.compute_logits(hidden)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("lexshard makes its head at the first request: %s", error)


def mask_words(packed: npt.NDArray[np.int32], vocabulary_size: int) -> Words:
    """A row [ceil(V / 32)] of vLLM's bitmask as words of 64 bits [ceil(V / 64)]; bits beyond the
    vocabulary are 0."""
    words = np.zeros(-(-vocabulary_size // 64), np.uint64)
    words.view(np.int32)[: len(packed)] = packed[: 2 * len(words)]
    if vocabulary_size % 64:
        words[-1] &= np.uint64((1 << vocabulary_size % 64) - 1)
    return words


def mask_rows(
    names: Sequence[str], guesses: Mapping[str, Sequence[int]], rows: int
) -> dict[tuple[str, int], int]:
    """Which of the ``rows`` of vLLM's bitmask is that of a request behind so many of its
    ``guesses``: vLLM 0.32 gives each request one and a row for each guess, 0.33 the same number to
    all. Raises ValueError for any other number."""
    counts = np.array([1 + len(guesses.get(name, ())) for name in names], np.int64)
    firsts = np.cumsum(counts) - counts
    if rows != counts.sum():
        each, left = divmod(rows, len(names))
        if left or each < counts.max():
            raise ValueError(f"a bitmask of {rows} rows for {counts.tolist()} places of requests")
        firsts = np.arange(len(names)) * each
    own = zip(names, firsts.tolist(), counts.tolist(), strict=True)
    return {(name, place): first + place for name, first, count in own for place in range(count)}


def _masks(logits: Tensor, guesses: Any, batch: Any, names: Any, packed: Any) -> dict[int, Words]:
    """By row of ``logits``, the words of vLLM's bitmask ``packed`` of the requests ``names``."""
    rows = mask_rows(batch.req_ids, guesses, len(logits))  # which are numbered as its rows are
    found = mask_rows(names, guesses, len(packed)).items()
    own = {rows[each]: packed[row] for each, row in found if each in rows}
    return {row: mask_words(each, logits.shape[1]) for row, each in own.items()}


def _note_masks_first(own: Function, scheduled: Any, grammar: Any, batch: Any, logits: Any) -> None:
    """``apply_grammar_bitmask``, which keeps the masks of deferred logits as data."""
    if not isinstance(logits, DeferredLogits):
        return own(scheduled, grammar, batch, logits)
    names, packed = grammar.structured_output_request_ids, grammar.grammar_bitmask
    masks = _masks(logits, scheduled.scheduled_spec_decode_tokens, batch, names, packed)
    return logits.constrain(masks, partial(own, scheduled, grammar, batch))


def _note_masks_second(own: Function, worker: Any, logits: Any, *asked: Any) -> None:
    """As of the first runner."""
    if not isinstance(logits, DeferredLogits):
        return own(worker, logits, *asked)
    return logits.constrain(_masks(logits, {}, *asked), lambda dense: own(worker, dense, *asked))


def _sample_first(own: Function, runner: Any, logits: Any, metadata: Any) -> Any:
    """``_sample`` for deferred logits: certified rows first, vLLM's ``own`` for what is left."""
    if not isinstance(logits, DeferredLogits):
        return own(runner, logits, metadata)
    batch = runner.input_batch
    if other := {type(each).__name__ for each in batch.logitsprocs.all} - FIRST_BUILT_IN:
        TALLY.refuse(f"steps with the logits processors {', '.join(sorted(other))}", len(logits))
        return own(runner, logits.dense(), metadata)
    batch.update_async_output_token_ids()
    batch.generators.clear()  # vLLM would take back from them what discarded draws had
    asked = _asked(runner, metadata)
    found = logits.decider.decide(logits, asked, runner.requests)
    by_name = {each.request_id: answer for each, answer in zip(asked, found, strict=True)}
    for name, answer in by_name.items():  # what is left to vLLM draws by its own
        if answer is None and (generator := runner.requests[name].generator) is not None:
            batch.generators[batch.req_id_to_index[name]] = generator
    output = own(runner, logits.dense(), metadata) if None in found else _blank(batch, metadata)
    scores = output.logprobs_tensors
    tensors = [each.cpu() for each in (output.sampled_token_ids, *(scores or ())[:3])]
    tensors = as_tensors([by_name.get(name) for name in batch.req_ids], *tensors)
    output.sampled_token_ids, *changed = (each.to(logits.device) for each in tensors)
    if scores is not None:
        output.logprobs_tensors = type(scores)(*changed, *scores[3:])
    return output


def _asked(runner: Any, metadata: Any) -> list[AskedRequest]:
    """What the requests that draw ask; those amid their prompts do not."""
    batch, count = runner.input_batch, runner.input_batch.num_reqs
    guesses, numbers, rows = [], [0] * count, runner.query_start_loc.gpu[1 : count + 1] - 1
    if metadata is not None:
        guesses, numbers = metadata.draft_token_ids.tolist(), metadata.num_draft_tokens
        rows = metadata.logits_indices
    lengths = (runner.positions[rows.long()] + 1).tolist()
    asked, first, left = [], 0, iter(guesses)
    for place, number in enumerate(numbers):
        own = list(islice(left, number))
        drafts = tuple(takewhile(lambda guess: guess >= 0, own))  # the others are padding
        if not runner.discard_request_mask.np[place]:
            name, prompt = batch.req_ids[place], int(batch.num_prompt_tokens[place])
            where, tokens = (prompt, lengths[first], first), partial(_first_tokens, batch, place)
            parameters = runner.requests[name].sampling_params
            asked.append(AskedRequest(name, parameters, *where, drafts, tokens))
        first += 1 + number
    return asked


def _first_tokens(batch: Any, place: int, first: int, last: int) -> Any:
    known = batch.is_token_ids[place, first:last]
    return np.where(known, batch.token_ids_cpu[place, first:last], -1).tolist()


def _blank(batch: Any, metadata: Any) -> Any:
    """What vLLM's sampler gives for the requests of a batch; a first token stands for those amid
    their prompts, which vLLM discards."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    width = 1 if metadata is None else metadata.max_spec_len + 1
    tokens = torch.full((batch.num_reqs, width), -1, dtype=torch.int32)
    tokens[:, 0] = 0
    wanted = batch.sampling_metadata.max_num_logprobs
    scores = None if wanted is None else LogprobsTensors.empty_cpu(tokens.numel(), wanted + 1)
    return SamplerOutput(tokens, scores)


def as_tensors(answers: Sequence[Answer | None], tokens: Tensor, *scores: Tensor) -> list[Tensor]:
    """``tokens`` [B, S] and, where requests asked for log-probabilities, ``scores`` with
    ``answers`` [B] written into them: ids and log-probabilities [B * S, K + 1], the drawn token
    first, and its rank [B * S]."""
    width = tokens.shape[1]
    tops = [len(each.logprobs.top) for answer in answers for each in answer or () if each.logprobs]
    lacking = 1 + max(tops, default=0) - scores[0].shape[1] if scores else 0
    if lacking > 0:  # vLLM has columns for the tokens that another request names alone
        columns, values, ranks = scores
        scores = pad(columns, (0, lacking)), pad(values, (0, lacking), value=-np.inf), ranks
    for place, answer in enumerate(answers):
        if ids := [each.token_id for each in answer or ()]:
            tokens[place] = torch.tensor(ids + [-1] * (width - len(ids)), dtype=tokens.dtype)
        for row, decision in enumerate(answer or (), start=place * width):
            found = decision.logprobs
            if found is not None and scores:
                best, logprobs = zip((found.token_id, found.logprob), *found.top, strict=True)
                scores[0][row, : len(best)] = torch.tensor(best)
                scores[1][row, : len(best)] = torch.tensor(logprobs)
                scores[2][row] = found.rank
    return [tokens, *scores]


def batch_refusal(sampler: Any, batch: Any) -> str | None:
    """Why vLLM must compute the logits of a batch; None if it need not."""
    kind = type(sampler).__name__
    if kind != "Sampler":  # one for a watermark inherits what is wrapped, and draws otherwise
        return f"batches with the sampler {kind} in vLLM's second model runner"
    refusals = {
        # Those that are not verified now, after all, have masks, too.
        "guesses": batch.num_draft_tokens or np.any(batch.num_draft_tokens_per_req),
        "log-probabilities": sampler.get_logprobs_dims(batch.idx_mapping_np) is not None,
        "other logits processors": {type(each).__name__ for each in sampler.logits_processors}
        - SECOND_BUILT_IN,
        "checks of logits": sampler.compute_nans or sampler.return_sampling_mask,
    }
    found = next((reason for reason, holds in refusals.items() if holds), None)
    return found and f"batches with {found} in vLLM's second model runner"


def _defer_second(own: Function, runner: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
    """``sample``, which asks for deferred logits of batches that they are enough for."""
    refusal = batch_refusal(runner.sampler, batch)
    if refusal is not None:
        TALLY.refuse(refusal, len(batch.logits_indices))
    with deferring(wanted=refusal is None):
        return own(runner, hidden, batch, grammar)


def _remember(add_request: Function, sampler: Any, place: int, parameters: Any) -> None:
    add_request(sampler, place, parameters)
    sampler.__dict__.setdefault("lexshard_parameters", {})[place] = parameters


def sample_second(own: Function, sampler: Any, logits: Any, *rest: Any, **named: Any) -> Any:
    """``sample`` of its sampler: tokens [N] of certified rows, vLLM's ``own`` of what is left."""
    if not isinstance(logits, DeferredLogits):
        return own(sampler, logits, *rest, **named)
    states, asked = sampler.req_states, []
    for row, (place, before) in enumerate(zip(rest[2].tolist(), rest[3].tolist(), strict=True)):
        if before + 1 < states.prefill_len.np[place]:
            continue  # amid its prompt
        name, parameters = states.index_to_req_id[place], sampler.lexshard_parameters[place]
        prompt, tokens = int(states.prompt_len.np[place]), partial(_second_tokens, states, place)
        asked.append(AskedRequest(name, parameters, prompt, before + 1, row, (), tokens))
    found = logits.decider.decide(logits, asked, states.req_id_to_index)
    drawn, processed = torch.zeros(len(logits), dtype=torch.int64, device=logits.device), logits
    if None in found:
        drawn, processed = own(sampler, logits.dense(), *rest, **named)
    for each, answer in zip(asked, found, strict=True):
        if answer is not None:
            drawn[each.first] = answer[0].token_id
    return drawn, processed


def _second_tokens(states: Any, place: int, first: int, last: int) -> Any:
    return states.all_token_ids.gpu[place, first:last].tolist()
