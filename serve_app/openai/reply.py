"""What a completion and a chat completion have in common once their prompts are known."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.configuration import EngineInformation
from actors.messages import Request, SamplingParameters
from actors.text.token_bytes import TokenBytes
from serve_app.admission import Ticket
from serve_app.openai.choice import Choice, OutputOptions
from serve_app.openai.errors import bad_request
from serve_app.openai.generation import Generation
from serve_app.openai.logprobs import LogprobsFormatter
from serve_app.openai.output_budget import OutputBudget
from serve_app.openai.parameters import GenerationRequest, random_seed, stop_strings
from serve_app.openai.prompts import Prompt, check_and_truncate
from serve_app.request_record import RequestRecord
from serve_app.server_state import ServerState


@dataclass(frozen=True, slots=True)
class Reply:
    """``header`` is what every chunk and the whole response begin with; ``seed`` is None unless
    the client asked for it, and one per prompt where there are several."""

    header: dict[str, Any]
    options: OutputOptions
    formatter: LogprobsFormatter
    seed: int | list[int] | None
    include_usage: bool
    continuous_usage: bool


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
    )


def prepare(
    state: ServerState,
    information: EngineInformation,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    parameters: SamplingParameters,
    options: OutputOptions,
    output_budget: OutputBudget,
    id_prefix: str,
    object_name: str,
    ticket: Ticket,
    record: RequestRecord,
) -> tuple[Reply, Generation]:
    """Checks lengths and makes the engine's requests, one per choice so that each can be cancelled.

    Prompts of a batch share a given seed, so that each is answered as it would be alone; without
    one each gets its own.

    Raises:
        ApiError: 400 for a prompt that does not fit or is no prompt of this model.
    """
    token_bytes = state.tokenizer.token_bytes
    visible = state.tokenizer.visible_token_bytes if options.skip_special_tokens else token_bytes
    engine_id = uuid.uuid4().hex
    choices: list[Choice] = []
    seeds: list[int] = []
    prompt_tokens = 0
    for i, prompt in enumerate(prompts):
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
        prompt_tokens += len(prompt.ids)
        seeds.append(random_seed() if request.seed is None else request.seed)
        own = replace(parameters, max_tokens=budget, seed=seeds[-1] % 2**64)
        echo_text = _echo_text(prompt, visible) if options.echo else ""
        for n in range(request.choices):
            engine_request = Request(
                f"{engine_id}-{i}-{n}", n, prompt.ids, own, request.priority or 0
            )
            index = i * request.choices + n
            choices.append(Choice(index, engine_request, echo_text, options, visible))
    ticket.set_waiting(prompt_tokens * request.choices)
    stream_options = request.stream_options
    reply = Reply(
        header={
            "id": f"{id_prefix}-{request.request_id or engine_id}",
            "object": object_name,
            "created": int(time.time()),
            "model": state.model_name(request.model),
            "system_fingerprint": state.fingerprint(information),
        },
        options=options,
        formatter=LogprobsFormatter(token_bytes, options.tokens_as_ids),
        seed=None if not request.return_seed else seeds[0] if len(seeds) == 1 else seeds,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
    )
    generation = Generation(state.client, choices, prompt_tokens, visible, ticket, record)
    return reply, generation


def _echo_text(prompt: Prompt, token_bytes: TokenBytes) -> str:
    """The prompt as the client wrote it, else as its ids read."""
    if prompt.text is not None:
        return prompt.text
    content = b"".join(token_bytes[token_id] for token_id in prompt.ids)
    return content.decode(errors="replace")
