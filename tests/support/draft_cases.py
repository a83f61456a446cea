"""Small draft models, heads and routers with random weights, and sequences to draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lexshard.actors.body.fused import FusedBody
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import words_of
from lexshard.kernels.draft import Drafted, DraftHead, PendingTokens, Router, cpu
from lexshard.kernels.linear import Arithmetic, pack
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import GELU, LlamaShape, LlamaStack, LlamaWeights

WIDTH = 32
PER_SEQUENCE = set(PendingTokens._fields) - {"tokens", "offsets", "record"}
VERY_MANY = 5000  # as top-k: more than there are


def random_stack(
    random: np.random.Generator,
    *,
    half: bool = False,
    vocabulary: int = 300,
    blocks: int = 24,
    window: int = 0,
    extras: bool = False,
    gemma: bool = False,
    arithmetic: Arithmetic = "float32",
) -> LlamaStack:
    """Two layers; ``extras`` are what only some families have: biases, query and key norms, and
    with ``gemma`` all that is Gemma's: norms of what is added, a bent score, GELU, scaled
    embeddings, layers with and without a window that turn by other angles."""
    own: dict[str, Any] = {"softcap": 3.0, "activation": GELU, "embedding_scale": 5.5}
    shape = LlamaShape(2, WIDTH, 48, 4, 2, 16, 1e-5, 0.25, **own if gemma else {})

    def normal(*size: int, scale: float = 0.2) -> torch.Tensor:
        values = torch.from_numpy(scale * random.standard_normal(size)).float()
        return values.bfloat16().float() if half else values

    def products(outputs: int, depth: int) -> np.ndarray:
        rows = [normal(outputs, depth) for _ in range(2)]
        return np.stack([pack(each, half=half, arithmetic=arithmetic).panels for each in rows])

    angles = np.outer(np.arange(256), 100.0 ** -(np.arange(8) / 8)).astype(np.float32)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    norm = shape.head_dim if extras else 0
    added = WIDTH if gemma else 0
    weights = LlamaWeights(
        attention_norm=normal(2, WIDTH, scale=0.3).numpy() + np.float32(1),
        qkv=products(heads, WIDTH),
        qkv_bias=normal(2, heads if extras else 0).numpy(),
        query_norm=normal(2, norm).numpy() + np.float32(1),
        key_norm=normal(2, norm).numpy() + np.float32(1),
        attention_output=products(WIDTH, shape.heads * shape.head_dim),
        attended_norm=normal(2, added, scale=0.3).numpy() + np.float32(1),
        mlp_norm=normal(2, WIDTH, scale=0.3).numpy() + np.float32(1),
        gate_up=products(2 * shape.intermediate, WIDTH),
        down=products(WIDTH, shape.intermediate),
        inner_norm=normal(2, added, scale=0.3).numpy() + np.float32(1),
        final_norm=normal(WIDTH, scale=0.3).numpy() + np.float32(1),
        cosine=np.stack([np.cos(angles), np.cos(angles / 8)]),
        sine=np.stack([np.sin(angles), np.sin(angles / 8)]),
        tables=np.array([0, 1 if gemma else 0]),
        windows=np.array([window, 0 if gemma else window]),
    )
    embedding: np.ndarray = normal(vocabulary, WIDTH, scale=1.0).numpy()
    if half:
        embedding = (embedding.view(np.uint32) >> 16).astype(np.uint16)
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    nothing = float("nan") if dtype == torch.float32 else -1  # two that are not a number
    caches = allocate_cache(2 * blocks, shape.kv_heads, shape.head_dim, dtype=dtype)
    keys, values = (
        words_of(each.fill_(nothing)).reshape(2, blocks, *each.shape[1:]) for each in caches
    )
    return LlamaStack(shape, weights, embedding, keys, values)


def head_of(
    weight: np.ndarray,
    clusters: Sequence[np.ndarray],
    *,
    always: Sequence[int] = (),
    router: Router | None = None,
) -> DraftHead:
    """The rows ``weight [V, d]`` of tokens by cluster; half storage where the weights allow it."""
    ids, places, offsets = [], [], [0]
    for cluster in clusters:
        room = -(-len(cluster) // PANEL) * PANEL
        ids.append(np.pad(np.sort(cluster), (0, room - len(cluster)), constant_values=-1))
        offsets.append(offsets[-1] + room // PANEL)
    places = np.concatenate([np.empty(0, np.int64), *ids])
    rows = np.where(places[:, None] >= 0, weight[places], np.float32(0))
    return DraftHead(
        pack(torch.from_numpy(rows.astype(np.float32))).panels,
        places.astype(np.int32),
        np.array(offsets, np.int32),
        np.array(always, np.int32),
        router,
    )


def random_clusters(
    random: np.random.Generator, vocabulary: int, count: int, share: float = 1.0
) -> list[np.ndarray]:
    """``share`` of the vocabulary in clusters, of which some are large and some empty."""
    tokens = random.permutation(vocabulary)[: max(1, int(share * vocabulary))]
    cuts = np.sort(random.integers(0, len(tokens) + 1, count - 1))
    return np.split(tokens, cuts)


def random_router(
    random: np.random.Generator, width: int, clusters: int, budgets: Sequence[int]
) -> Router:
    inner = 32

    def matrix(outputs: int, depth: int) -> np.ndarray:
        values = 0.3 * random.standard_normal((outputs, depth))
        return pack(torch.from_numpy(values).float(), half=False).panels

    return Router(
        matrix(inner, 2 * width),
        (0.3 * random.standard_normal(inner)).astype(np.float32),
        matrix(clusters, inner),
        (0.3 * random.standard_normal(clusters)).astype(np.float32),
        np.array(budgets, np.int32),
    )


@dataclass(frozen=True, slots=True)
class DraftCase:
    """Sequences in the middle of their lives: prefixes in the cache, pending tokens after them."""

    stack: LlamaStack
    prefixes: PendingTokens
    pending: PendingTokens

    def run(self, head: DraftHead, module: ModuleType = cpu) -> tuple[LlamaStack, Drafted]:
        """On a cache of its own, which is returned with the answer."""
        caches = {name: getattr(self.stack, name).copy() for name in ("key_cache", "value_cache")}
        stack = replace(self.stack, **caches)
        if self.prefixes.tokens.size:
            module.draft(stack, head, self.prefixes)
        return stack, module.draft(stack, head, self.pending)


def random_case(
    random: np.random.Generator, stack: LlamaStack, sequences: int, longest: int
) -> DraftCase:
    """Prefixes of up to 40 tokens, 1 to 4 pending ones, up to ``longest`` guesses, any blocks."""
    vocabulary, blocks = len(stack.embedding), stack.key_cache.shape[1]
    each = blocks // sequences
    start = random.integers(1, min(41, each * BLOCK_SIZE - 4 - longest), sequences)
    counts = random.integers(1, 5, sequences)
    common: dict[str, Any] = {
        "block_tables": random.permutation(blocks)[: each * sequences]
        .reshape(sequences, each)
        .astype(np.int32),
        "key": random.integers(0, 2**64, sequences, dtype=np.uint64),
        "inverse_temperature": random.choice([0.0, 1.0, float(np.float32(1 / 0.7))], sequences),
        "top_k": random.choice([0, 0, 1, 5, 50, VERY_MANY], sequences),
        "top_p": random.choice([1.0, 1.0, 0.9, 0.3], sequences),
        "log_min_p": random.choice([-np.inf, -np.inf, np.log(0.05)], sequences),
        "state_before": random.standard_normal((sequences, WIDTH)).astype(np.float32),
    }

    def tokens(lengths: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "tokens": random.integers(0, vocabulary, lengths.sum()).astype(np.int32),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        }

    nothing = np.zeros(sequences, np.int32)
    prefixes = PendingTokens(**tokens(start), start=nothing, most=nothing, **common)
    pending = PendingTokens(
        **tokens(counts),
        start=start.astype(np.int32),
        most=random.integers(0, longest + 1, sequences).astype(np.int32),
        **common,
    )
    return DraftCase(stack, prefixes, pending)


def sequence_of(pending: PendingTokens, sequence: int) -> PendingTokens:
    """One of the sequences, alone."""
    own = slice(sequence, sequence + 1)
    first, stop = pending.offsets[sequence : sequence + 2]
    each = {name: rows[own] for name, rows in pending._asdict().items() if name in PER_SEQUENCE}
    offsets = np.array([0, stop - first])
    return PendingTokens(tokens=pending.tokens[first:stop], offsets=offsets, **each)


def full_head(model: LoadedModel, ids: np.ndarray | None = None) -> DraftHead:
    """Every row of a model's head, or those of ``ids``, in one cluster."""
    weight = model.head.weight.float().numpy()
    return head_of(weight, [np.arange(len(weight)) if ids is None else ids])


def routed_head(model: LoadedModel, seed: int, clusters: int, budgets: Sequence[int]) -> DraftHead:
    """A random router's."""
    random = np.random.default_rng(seed)
    weight = model.head.weight.float().numpy()
    router = random_router(random, weight.shape[1], clusters, budgets)
    return head_of(
        weight, random_clusters(random, len(weight), clusters), always=[0], router=router
    )


def model_drafter(
    model: LoadedModel, head: DraftHead | None = None, *, blocks: int = 64
) -> ModelDrafter:
    """A drafter with a body of its own over the weights of ``model``."""
    loaded = model.body
    assert isinstance(loaded, FusedBody)
    body = FusedBody(loaded._shape, loaded._weights, loaded._embedding, loaded.max_positions)
    return ModelDrafter(
        body, head or full_head(model), blocks=blocks, vocabulary_size=model.vocabulary_size
    )


def guessed(drafter: Drafter, tasks: Sequence[DraftTask]) -> list[list[int]]:
    """The ids that a drafter guesses."""
    return [list(draft.token_ids) for draft in drafter.propose(tasks)]
