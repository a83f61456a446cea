"""What vLLM's server tells of itself, in its shapes; and what it has and this server has not."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lexshard.serve_app.openai.errors import json_response
from lexshard.serve_app.scoring.pairs import RERANK_PATHS, SCORE_PATHS
from lexshard.serve_app.server_state import VERSION, ServerState

_NO_EMBEDDINGS = "this server generates text: it has no embeddings, classes or pooled states"
_NO_PAIRS = (
    "this server scores pairs of texts only where --score-label and --score-template say how; "
    "/generative_scoring scores texts by the likelihood of labels"
)
_NO_ADAPTERS = "this server has no LoRA adapters: it serves one model, as it was started"
# Paths of peers' servers where there is nothing, those of pairs unless options say how they are
# scored; and what is said there.
_ABSENT = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/embed"), _NO_EMBEDDINGS
    ),
    **dict.fromkeys((*SCORE_PATHS, *RERANK_PATHS), _NO_PAIRS),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _NO_ADAPTERS),
}
_NO_BACKGROUND = (
    "this server makes no responses in the background ('background' is not implemented): to end "
    "one, close the connection it comes by"
)


def absent(path: str) -> str | None:
    """What is said of such a path, where it is one of a peer's."""
    if path.startswith("/v1/responses/") and path.endswith("/cancel"):
        return _NO_BACKGROUND
    return _ABSENT.get(path)


async def load(state: ServerState, _: Request) -> Response:
    """How many sequences are open."""
    return json_response({"server_load": state.admission.sequences})


async def server_info(state: ServerState, _: Request) -> Response:
    """What the engine decided when it started.

    Raises:
        ApiError: 503 while there is none to ask.
    """
    information, config = state.information(), state.config
    return json_response(
        {
            "vllm_config": {
                "model_config": {
                    "model": information.model,
                    "served_model_name": list(config.model_names),
                    "dtype": information.dtype,
                    "max_model_len": information.max_model_len,
                    "vocab_size": information.vocabulary_size,
                },
                "cache_config": {"num_gpu_blocks": information.kv_blocks},
                "scheduler_config": {"max_num_seqs": config.max_running_requests},
                "device_config": {"device": information.device},
            },
            "system_env": {"lexshard_version": VERSION},
        }
    )
