"""What the server answers, as JSON Schema sees it. Nothing is written by these: they describe what
the writers of `serve_app.openai` write, and a test holds the two together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lexshard.actors.messages import Certificate, TokenOrigin


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(Reply):
    message: str
    type: str
    param: Annotated[str | None, Field(description="the field of the request that is wrong")]
    code: str | None


class ErrorReply(Reply):
    error: ErrorObject


class CachedTokens(Reply):
    cached_tokens: int


class ReasoningTokens(Reply):
    reasoning_tokens: int


class UsageReply(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class CompletionLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatToken(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprobs]
    refusal: None


class RankedToken(Reply):
    logprob: float
    rank: int
    decoded_token: str


class Candidate(Reply):
    token_id: int
    bytes: list[int]
    logit: float
    logprob: float


class DrawnToken(Candidate):
    rank: int
    top: list[Candidate]


Ended = Literal["stop", "length", "error"]
PromptLogprobs = list[dict[str, RankedToken] | None]


class ChoiceReply(Reply):
    index: int
    token_ids: list[int] | None = None
    token_bytes: list[list[int]] = []
    rejected_bytes: list[list[int] | None] = []
    candidates: list[DrawnToken] = []
    certificates: list[Certificate] = []
    drafts: list[TokenOrigin] = []
    receipt: dict[str, Any] = {}
    error: ErrorObject | None = None


class CompletionText(ChoiceReply):
    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionText):
    finish_reason: Ended


class CompletionPart(CompletionText):
    finish_reason: Ended | None


class CalledFunction(Reply):
    name: str = ""
    arguments: Annotated[str, Field(description="JSON; in a stream the next piece of it")]


class CalledCustomTool(Reply):
    name: str = ""
    input: Annotated[str, Field(description="in a stream the next piece of it")]


class ToolCall(Reply):
    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ToolCallPart(Reply):
    index: int
    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


ChatEnded = Literal["stop", "length", "tool_calls", "error"]


class ChatChoice(ChoiceReply):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnded
    stop_reason: int | str | None


class ChatDelta(Reply):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPart] = []


class ChatPart(ChoiceReply):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnded | None
    stop_reason: int | str | None = None


class GenerationReply(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int | list[int] = 0
    constraint_notes: list[str] = []


class CompletionReply(GenerationReply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageReply


class CompletionChunk(GenerationReply):
    object: Literal["text_completion"]
    choices: list[CompletionPart]
    usage: UsageReply | None = None


class ChatReply(GenerationReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(GenerationReply):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: UsageReply | None = None
    prompt_token_ids: list[int] = []


class ModelReply(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelsReply(Reply):
    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Reply):
    prompt: str


class TokenizerReply(Reply):
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    additional_special_tokens: list[str]
    chat_template: str | None
    model_max_length: int


class StatusReply(Reply):
    """Meant for `lexshard status`; more may come."""

    model_config = ConfigDict(extra="allow")

    version: str
    model: str
    ready: bool
    reason: str | None
    engine_restarts: int
    roles: list[dict[str, Any]]
    queue: dict[str, int]


class HealthReply(Reply):
    status: Literal["ok"]


class EdgeReply(Reply):
    version: int
    models: list[str]
    vocabulary: str
    chat_template: str | None
    engine: dict[str, Any]


class ScoreReply(Reply):
    index: int
    object: Literal["score"]
    score: float


class ScoresReply(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreReply]
    usage: UsageReply


class VerdictReply(Reply):
    index: int
    object: Literal["receipt.verdict"]
    equal: bool
    tokens: int
    equal_tokens: int
    reason: (
        Literal["altered", "other model", "other tokenizer", "other arithmetic", "not its own"]
        | None
    )
    explanation: str
    expected_token_id: int | None
    found_token_id: int | None
    signed_by: str | None


class VerdictsReply(Reply):
    object: Literal["list"]
    data: list[VerdictReply]


class ReplayEvent(Reply):
    """How far a reply has come, or its verdict, which has all that `VerdictReply` has."""

    index: int
    object: Literal["receipt.progress", "receipt.verdict"]
    equal_tokens: int
    equal: bool = False
    tokens: int = 0
    reason: str | None = None
    explanation: str = ""
    expected_token_id: int | None = None
    found_token_id: int | None = None
    signed_by: str | None = None


class RankedText(Reply):
    text: str


class RankedDocument(Reply):
    index: int
    relevance_score: float
    document: Annotated[RankedText | None, Field(description="unless it was not asked for")] = None


class RerankUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class RerankReply(Reply):
    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


class LoadReply(Reply):
    server_load: int


class ServerInfoReply(Reply):
    vllm_config: dict[str, Any]
    system_env: dict[str, str]


class VersionReply(Reply):
    version: str
