"""What every route that generates has in common: from what a request wants, in the words of no
protocol, to its response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.types import ASGIApp

from lexshard.actors.messages import Drafting, Request, SamplingParameters
from lexshard.actors.receipts.document import Provenance
from lexshard.actors.receipts.stop_rule import StopRule
from lexshard.actors.text.token_bytes import TokenBytes
from lexshard.serve_app.admission import Ticket, waiting_cost
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.choice import Choice, OutputOptions
from lexshard.serve_app.openai.errors import bad_request, context_length_exceeded
from lexshard.serve_app.openai.generation import Generation
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.parameters import check_common, random_seed, sampling_parameters
from lexshard.serve_app.openai.prompts import (
    Prompt,
    RawPrompt,
    TextReader,
    check_and_truncate,
    estimated_tokens,
)
from lexshard.serve_app.openai.protocol import MAX_PROMPT_LOGPROBS, GenerationFields, parse
from lexshard.serve_app.openai.response_writer import ResponseWriter
from lexshard.serve_app.openai.streaming import respond
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState
from lexshard.serve_app.structured.applying import constraint_of
from lexshard.serve_app.structured.constraint import Constraint, RefusedGrammarError
from lexshard.serve_app.tools.plan import ReplyPlan

Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a protocol makes of a request of its own.

    ``texts`` tell about what it will cost, before ``encode`` makes its prompts of them; they are in
    its field ``prompt_field``. At most ``max_tokens`` follow each, where it says nothing
    ``default_tokens``, else all that fit. ``logprobs`` of the output and ``prompt_logprobs``: how
    many of the likeliest, None for none. ``writer`` tells of the choices as the protocol does.
    ``plan`` is what replies are read by, and held to around what the request's fields ask for.
    """

    writer: type[ResponseWriter]
    prompt_field: str
    texts: Sequence[RawPrompt]
    encode: Callable[[TextReader], Awaitable[list[Prompt]]]
    max_tokens: int | None
    default_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    reasoning: bool = True  # is told
    plan: ReplyPlan | None = None


def read_fields(
    model: type[Fields], body: Any, state: ServerState, record: RequestRecord
) -> Fields:
    """A body as the request it is, as far as all protocols check it alike.

    Raises:
        ApiError: whatever is wrong with it.
    """
    fields = parse(model, body)
    record.request_id = fields.request_id or record.request_id
    state.model_name(fields.model)
    check_common(fields, record)
    return fields


async def answer(call: HttpCall, fields: GenerationFields, wanted: Wanted) -> ASGIApp:
    """The response to a request, which is let in, tokenised, and handed to the engine.

    Raises:
        ApiError: as `begun`, and what the engine says of a response that is no stream.
    """
    generation, writer = await begun(call, fields, wanted)
    stream = bool(fields.stream)
    del fields, wanted  # the decoded body, which a reply that is no stream would hold to its end
    return await respond(call, generation, writer, stream=stream)


async def begun(
    call: HttpCall, fields: GenerationFields, wanted: Wanted
) -> tuple[Generation, ResponseWriter]:
    """A request that is let in and tokenised, and what writes the response to it. The generation
    must be closed.

    Raises:
        ApiError: 400 for prompts that do not fit or are none of this model, or for what the output
            cannot be held to, 429 or 503 as `Admission.admit` says.
    """
    preparation = Preparation(call.state, fields, wanted, call.record)
    reader = call.reader()
    ticket = preparation.admitted()
    with ticket.released_on_error():
        prompts = await wanted.encode(reader)
        bad_words = await reader.bad_words(fields.bad_words or ())
        constraint = await _constraint(call, fields, wanted.plan)
        made_by = None
        if fields.receipt:
            made_by = await call.state.receipts.provenance(preparation.information)
        return preparation.made(prompts, bad_words, ticket, constraint, made_by)


async def _constraint(
    call: HttpCall, fields: GenerationFields, plan: ReplyPlan | None
) -> Constraint | None:
    """What the output must match, which is known to compile."""
    around = None if plan is None else plan.around
    while True:
        try:
            return await constraint_of(call, fields, around)
        except RefusedGrammarError as error:
            if plan is None:
                raise
            await plan.relax(call, error)


class Preparation:
    """One request on its way to the engine."""

    def __init__(
        self, state: ServerState, fields: GenerationFields, wanted: Wanted, record: RequestRecord
    ) -> None:
        self.information = state.information()
        self._state = state
        self._fields = fields
        self._wanted = wanted
        self._record = record

    def admitted(self) -> Ticket:
        """Lets the request in by what its prompts will about cost: they are not tokenised yet."""
        wanted, choices = self._wanted, self._fields.choices
        keep, context = self._fields.truncate_prompt_tokens, self.information.max_model_len
        most = min(context, keep) if keep and keep > 0 else context
        estimate = estimated_tokens(wanted.texts, most)
        scored = wanted.prompt_logprobs is not None
        cost = sum(waiting_cost(estimate, choice, scored) for choice in range(choices))
        client = self._record.client
        return self._state.admission.admit(client, len(wanted.texts) * choices, cost)

    def made(
        self,
        prompts: Sequence[Prompt],
        bad_words: tuple[tuple[int, ...], ...],
        ticket: Ticket,
        constraint: Constraint | None = None,
        made_by: Provenance | None = None,
    ) -> tuple[Generation, ResponseWriter]:
        """The engine's requests, one per choice so that each can be cancelled, and what writes the
        response to them. Receipts say that they are ``made_by`` this.

        Prompts of a batch share a given seed, so that each is answered as it would be alone;
        without one each gets its own.
        """
        state, fields, record = self._state, self._fields, self._record
        parameters = sampling_parameters(
            fields,
            self._output_logprobs(),
            self._wanted.prompt_logprobs,
            self.information,
            bad_words,
            constraint.text() if constraint is not None and constraint.held else None,
        )
        options = self._output_options()
        tokens = state.tokenizer.token_bytes
        visible = state.tokenizer.visible_token_bytes if options.skip_special_tokens else tokens
        plan = self._wanted.plan if self._wanted.plan and self._wanted.plan.reads else None
        shown_ids: tuple[int, ...] = ()
        if plan is not None and options.skip_special_tokens:
            visible = state.tokenizer.marked_token_bytes
            shown_ids = tuple(sorted(state.tokenizer.reply_format.token_ids.values()))
        stop_rule = None
        if options.stop:
            shown = not options.skip_special_tokens
            stop_rule = StopRule(options.stop, options.include_stop, shown, shown_ids)
        engine_id = uuid.uuid4().hex  # clients may use a request id twice
        asked = fields.priority
        priority = max(0, record.lowest_priority) if asked is None else asked
        scored = 0
        choices: list[Choice] = []
        seeds: list[int] = []
        for i, prompt in enumerate(prompts):
            prompt, budget = self._fitted(prompt, parameters)
            scored += len(prompt.ids) * fields.choices
            self._check_scores(scored)
            seeds.append(random_seed() if fields.seed is None else fields.seed)
            own = replace(parameters, max_tokens=budget, seed=seeds[-1] % 2**64)
            echo_text = _echo_text(prompt, visible) if options.echo else ""
            for n in range(fields.choices):
                engine_request = Request(
                    f"{engine_id}-{i}-{n}",
                    n,
                    prompt.ids,
                    own,
                    priority,
                    client=record.client,
                    cache_salt=record.cache_salt,
                    drafting=Drafting(most=fields.draft_tokens),
                )
                parser = None if plan is None else plan.parser()
                receipt = None
                if made_by is not None:
                    receipt = state.receipts.receipt_of(
                        engine_request, made_by, stop_rule, options.discard_output
                    )
                own_text = len(choices), engine_request, echo_text, options, visible
                choices.append(Choice(*own_text, parser, receipt))
        kind = self._wanted.writer
        seed = seeds[0] if len(seeds) == 1 else seeds
        writer = kind(
            header={
                "id": f"{kind.id_prefix}-{record.request_id}",
                "object": kind.chunk_object_name if fields.stream else kind.object_name,
                "created": int(time.time()),
                "model": state.model_name(fields.model),
                "system_fingerprint": state.fingerprint(self.information),
                **state.marks(),
            },
            options=options,
            formatter=LogprobsFormatter(tokens, options.tokens_as_ids),
            seed=seed if fields.return_seed else None,
            stream_options=fields.stream_options,
            notes=() if constraint is None else constraint.notes,
        )
        return Generation(state.client, choices, ticket, record), writer

    def _output_options(self) -> OutputOptions:
        fields, wanted = self._fields, self._wanted
        stop = fields.stop or ()
        return OutputOptions(
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            logprobs=wanted.logprobs,
            reasoning=wanted.reasoning,
            echo=wanted.echo,
            discard_output=wanted.max_tokens == 0,
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
            return_token_ids=bool(fields.return_token_ids),
            return_token_bytes=bool(fields.return_token_bytes),
            candidates=fields.candidates is not None,
            prompt_logprobs=fields.prompt_logprobs is not None,
            certificate=bool(fields.certificate),
            draft=bool(fields.draft),
        )

    def _output_logprobs(self) -> int | None:
        """Of how many of the likeliest the engine tells, for each token of the output.

        Raises:
            ApiError: 400 for a request that wants them in two ways.
        """
        candidates, logprobs = self._fields.candidates, self._wanted.logprobs
        if candidates is not None and logprobs is not None:
            told = "'candidates' tell log-probabilities, too: leave 'logprobs' out"
            raise bad_request(told, "candidates")
        return logprobs if candidates is None else candidates

    def _fitted(self, prompt: Prompt, parameters: SamplingParameters) -> tuple[Prompt, int]:
        """The prompt, truncated where the client wants it so, and how many tokens may follow it.

        Raises:
            ApiError: 400 where they do not fit the context or the client's own ``min_tokens``.
        """
        wanted, keep = self._wanted, self._fields.truncate_prompt_tokens
        if keep == -1:
            asked = wanted.max_tokens
            least = wanted.default_tokens or 1 if asked is None else max(1, asked)
            keep = max(1, self.information.context - least)
        prompt = check_and_truncate(prompt, keep, self.information, self._fields.truncation_side)
        budget = self._budget(len(prompt.ids))
        if parameters.min_tokens > budget:
            raise bad_request(
                f"'min_tokens' is {parameters.min_tokens}, more than the {budget} tokens that "
                "may be generated",
                "min_tokens",
            )
        return prompt, budget

    def _budget(self, prompt_tokens: int) -> int:
        """How many tokens may follow so many of a prompt.

        Raises:
            ApiError: 400, with both numbers, when prompt and output do not fit the context.
        """
        information = self.information
        asked, field = self._wanted.max_tokens, self._wanted.prompt_field
        context = information.context
        least = max(1, asked or 0)
        if prompt_tokens + least > context:
            reason = f"your {field} resulted in {prompt_tokens}, which leaves none for an answer."
            if asked is not None:
                parts = f"{prompt_tokens} in the {field}, {least} in the completion"
                reason = f"you requested {prompt_tokens + least} tokens ({parts})."
            reason += f" Please reduce the length of the {field} or completion."
            if context < information.max_model_len:
                reason += f" (Of {information.max_model_len}, the KV cache holds {context}.)"
            raise context_length_exceeded(context, reason, field)
        if asked is not None:
            return least
        room = context - prompt_tokens
        return min(self._wanted.default_tokens or room, room)

    def _check_scores(self, tokens: int) -> None:
        """Raises:
        ApiError: 400 where the log-probabilities of so many prompt tokens are too many.
        """
        count = self._wanted.prompt_logprobs
        if count is not None and tokens * (count + 1) > MAX_PROMPT_LOGPROBS:
            by_prompt = self._fields.prompt_logprobs is not None
            raise bad_request(
                f"{count + 1} log-probabilities of each prompt token, for each of 'n' choices, are "
                f"{tokens * (count + 1)} or more; this server returns at most "
                f"{MAX_PROMPT_LOGPROBS}: ask for fewer, or of fewer prompts at once",
                "prompt_logprobs" if by_prompt else "logprobs",
            )


def _echo_text(prompt: Prompt, token_bytes: TokenBytes) -> str:
    """The prompt as the client wrote it, else as its ids read."""
    if prompt.text is not None:
        return prompt.text
    content = b"".join(token_bytes[token_id] for token_id in prompt.ids)
    return content.decode(errors="replace")
