"""What a completion and a chat completion have in common once their prompts are known."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.text.token_bytes import TokenBytes
from lexshard.serve_app.admission import Ticket, waiting_cost
from lexshard.serve_app.openai.choice import Choice, OutputOptions
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.openai.generation import Generation
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.output_budget import OutputBudget
from lexshard.serve_app.openai.parameters import GenerationRequest, random_seed, stop_strings
from lexshard.serve_app.openai.prompts import (
    Prompt,
    RawPrompt,
    check_and_truncate,
    estimated_tokens,
)
from lexshard.serve_app.openai.protocol import MAX_PROMPT_LOGPROBS
from lexshard.serve_app.openai.response_writer import ResponseWriter
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState


def output_options(
    request: GenerationRequest, logprobs: int | None, echo: bool, discard_output: bool
) -> OutputOptions:
    skip_special_tokens = request.skip_special_tokens
    return OutputOptions(
        stop=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
        logprobs=logprobs,
        echo=echo,
        discard_output=discard_output,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        return_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs is not None,
        certificate=bool(request.certificate),
        draft=bool(request.draft),
    )


def admit(
    state: ServerState,
    information: EngineInformation,
    request: GenerationRequest,
    prompts: Sequence[RawPrompt],
    scores: int | None,
    record: RequestRecord,
) -> Ticket:
    """Lets a request in by what its prompts will about cost: they are not tokenised yet.

    Raises:
        ApiError: 400, 429 or 503, as `Admission.admit` says.
    """
    keep = request.truncate_prompt_tokens
    context = information.max_model_len
    estimate = estimated_tokens(prompts, min(context, keep) if keep and keep > 0 else context)
    cost = sum(
        waiting_cost(estimate, choice, scores is not None) for choice in range(request.choices)
    )
    return state.admission.admit(record.client, len(prompts) * request.choices, cost)


def prepare(
    state: ServerState,
    information: EngineInformation,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    parameters: SamplingParameters,
    options: OutputOptions,
    output_budget: OutputBudget,
    writer_type: type[ResponseWriter],
    ticket: Ticket,
    record: RequestRecord,
) -> tuple[Generation, ResponseWriter]:
    """Makes the engine's requests, one per choice so that each can be cancelled, and what writes
    the response to them.

    Prompts of a batch share a given seed, so that each is answered as it would be alone; without
    one each gets its own.

    Raises:
        ApiError: 400 for a prompt that does not fit or is no prompt of this model.
    """
    token_bytes = state.tokenizer.token_bytes
    visible = state.tokenizer.visible_token_bytes if options.skip_special_tokens else token_bytes
    engine_id = uuid.uuid4().hex  # clients may use a request id twice
    asked = request.priority
    priority = max(0, record.lowest_priority) if asked is None else asked
    scored = 0
    choices: list[Choice] = []
    seeds: list[int] = []
    for i, prompt in enumerate(prompts):
        prompt, budget = _fitted(prompt, request, parameters, output_budget, information)
        scored += len(prompt.ids) * request.choices
        asked_by = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        _check_scores(scored, parameters.prompt_logprobs, asked_by)
        seeds.append(random_seed() if request.seed is None else request.seed)
        own = replace(parameters, max_tokens=budget, seed=seeds[-1] % 2**64)
        echo_text = _echo_text(prompt, visible) if options.echo else ""
        for n in range(request.choices):
            engine_request = Request(
                f"{engine_id}-{i}-{n}",
                n,
                prompt.ids,
                own,
                priority,
                client=record.client,
                cache_salt=record.cache_salt,
            )
            index = i * request.choices + n
            choices.append(Choice(index, engine_request, echo_text, options, visible))
    seed = seeds[0] if len(seeds) == 1 else seeds
    writer = writer_type(
        header={
            "id": f"{writer_type.id_prefix}-{record.request_id}",
            "object": writer_type.chunk_object_name if request.stream else writer_type.object_name,
            "created": int(time.time()),
            "model": state.model_name(request.model),
            "system_fingerprint": state.fingerprint(information),
        },
        options=options,
        formatter=LogprobsFormatter(token_bytes, options.tokens_as_ids),
        seed=seed if request.return_seed else None,
        stream_options=request.stream_options,
    )
    return Generation(state.client, choices, visible, ticket, record), writer


def _fitted(
    prompt: Prompt,
    request: GenerationRequest,
    parameters: SamplingParameters,
    output_budget: OutputBudget,
    information: EngineInformation,
) -> tuple[Prompt, int]:
    """The prompt, truncated where the client wants it so, and how many tokens may follow it.

    Raises:
        ApiError: 400 where they do not fit the context or the client's own ``min_tokens``.
    """
    keep = request.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, information.max_model_len - output_budget.wanted)
    prompt = check_and_truncate(prompt, keep, information)
    budget = output_budget.tokens(len(prompt.ids), information)
    if parameters.min_tokens > budget:
        raise bad_request(
            f"'min_tokens' is {parameters.min_tokens}, more than the {budget} tokens that "
            "may be generated",
            "min_tokens",
        )
    return prompt, budget


def _check_scores(tokens: int, count: int | None, asked_by: str) -> None:
    """Raises:
    ApiError: 400 where ``count`` log-probabilities of each of so many tokens are too many.
    """
    if count is not None and tokens * (count + 1) > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"{count + 1} log-probabilities of each prompt token, for each of 'n' choices, are "
            f"{tokens * (count + 1)} or more; this server returns at most {MAX_PROMPT_LOGPROBS}: "
            "ask for fewer, or of fewer prompts at once",
            asked_by,
        )


def _echo_text(prompt: Prompt, token_bytes: TokenBytes) -> str:
    """The prompt as the client wrote it, else as its ids read."""
    if prompt.text is not None:
        return prompt.text
    content = b"".join(token_bytes[token_id] for token_id in prompt.ids)
    return content.decode(errors="replace")
