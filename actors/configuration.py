"""What an engine must know to start: plain data, validated at the edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from lexshard.actors.messages import VerifyMode
from lexshard.actors.setting import setting

DataType = Literal["float32", "bfloat16", "auto"]
AttentionChoice = Literal["auto", "triton"]
BodyChoice = Literal["auto", "fused", "general"]
Device = Literal["auto", "cpu", "cuda"]
TierName = Literal["int8", "int4", "int4-dither", "1-bit"]
# On a CPU. Their bounds hold always; those of the other two with a stated probability.
DEFAULT_TIERS: tuple[TierName, ...] = ("int8", "int4")
# A GPU reads coarser ones no faster, and they leave it too much (docs/findings.md).
GPU_TIER: Final = "int8"
HeadChoice = Literal["auto", "certified", "paper", "dense"]
SamplerPlacement = Literal["processes", "ray"]
DraftLength = Literal["auto", "measured", "stepping", "fixed"]
ShardAssignmentMethod = Literal[
    "blocks-round-robin",
    "blocks-contiguous",
    "blocks-hotness",
    "clusters-round-robin",
    "clusters-hotness",
    "clusters-semantic",
]
DraftHeadChoice = Literal["auto", "full", "static", "router", "certified"]
SIGMOID_LIMITS = (-10.0, 10.0)  # alpha and beta of the papers
# Tokens of a step by default: what a device computes within some tens of milliseconds.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}
NGRAM = "ngram"  # in the place of a draft model's folder


@dataclass(frozen=True, slots=True)
class EngineConfiguration:
    """Settings of one engine; those with a description are options of a server, too."""

    model: str = field(
        metadata=setting(
            "folder, or ORG/NAME on the Hugging Face Hub",
            group="model",
            metavar="MODEL",
        )
    )
    dtype: DataType = field(
        default="auto", metadata=setting("auto, float32 or bfloat16", group="model")
    )
    device: Device = field(
        default="auto",
        metadata=setting("auto, cpu or cuda: where the model body computes", group="model"),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=setting("longest prompt plus output", group="model", metavar="TOKENS", least=1),
    )
    # None: what ``max_running`` sequences of full length need, at most a tenth of the machine's
    # memory, or of what ``gpu_memory_utilization`` leaves.
    kv_cache_bytes: int | None = field(
        default=None,
        metadata=setting(
            "memory of the KV cache, for example 4GiB",
            group="memory",
            metavar="BYTES",
            key="kv_cache_memory",
            least=1,
            in_bytes=True,
        ),
    )
    # What weights, head and the largest step leave of it is measured.
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata=setting(
            "how much of a GPU's memory may be used, the KV cache included (default 0.9)",
            group="memory",
            metavar="SHARE",
        ),
    )
    # None: steps of one row and of several are timed with every number of threads when the engine
    # starts. One core is left to HTTP where there are more than two, and one to samplers.
    threads: int | None = field(
        default=None,
        metadata=setting(
            "threads of the engine (default: the fastest, measured)", group="model", least=1
        ),
    )
    # Where nothing else runs: a neighbour on one of the cores then costs more than without.
    pin_threads: bool = field(
        default=False,
        metadata=setting("every thread of the engine keeps to a core of its own", group="model"),
    )
    body: BodyChoice = field(
        default="auto", metadata=setting("auto, fused or general", group="model")
    )
    # In pieces of 64 rows, fewer padded to as many. On a CPU a row never depends on others.
    batch_invariant: bool = field(
        default=False,
        metadata=setting(
            "on a GPU, steps of one fixed shape: tokens do not depend on the batch", group="model"
        ),
    )
    # Without torch.compile, which takes a while at start.
    no_compile: bool = field(
        default=False,
        metadata=setting(
            "on a GPU, the model's layers as they are written: starts faster", group="model"
        ),
    )
    attention: AttentionChoice = field(
        default="auto",
        metadata=setting(
            "on a GPU, auto (FlashInfer where it is installed and right) or triton", group="model"
        ),
    )
    # "certified" screens with low-precision copies of the output weights, "dense" with the weights,
    # "auto" with what is fastest here, "paper" with CSV-Decode's cluster bounds. No token changes.
    head: HeadChoice = field(
        default="auto",
        metadata=setting(
            "auto, certified, paper or dense: how tokens are found, never which", group="head"
        ),
    )
    # The copies; "int4-dither" and "1-bit" have certificates that hold with a stated probability.
    # Empty: those of the device.
    tiers: tuple[TierName, ...] = field(
        default=(),
        metadata=setting(
            "int8, int4, int4-dither or 1-bit: what may screen, repeatable (default int8, int4; on "
            "a GPU int8 alone)",
            group="head",
            flag="--tier",
        ),
    )
    # The file of copies and clusters (``lexshard index``); what is missing is built.
    index: str | None = field(
        default=None,
        metadata=setting(
            "vocabulary index (default: beside the model)", group="head", metavar="FILE"
        ),
    )
    # The engine's own process and as many Ray actors as it takes. No token depends on shards.
    shards: int = field(
        default=1,
        metadata=setting(
            "processes that share the output head (default 1)",
            group="cluster",
            metavar="N",
            least=1,
        ),
    )
    # Blocks of 64 tokens, or clusters of the index: in turn, side by side, near ones together, or
    # so that each shard has as much of the tokens in ``shard_trace``.
    shard_assignment: ShardAssignmentMethod = field(
        default="blocks-round-robin",
        metadata=setting(
            "which tokens are whose: blocks-round-robin (default), blocks-contiguous, "
            "blocks-hotness, clusters-round-robin, clusters-hotness or clusters-semantic",
            group="cluster",
            metavar="METHOD",
        ),
    )
    shard_trace: str | None = field(
        default=None,
        metadata=setting(
            "how often tokens are drawn, for methods by hotness: JSON lines (token_ids, messages, "
            "prompt or text) or plain text",
            group="cluster",
            metavar="FILE",
        ),
    )
    shard_seconds: int = field(
        default=10,
        metadata=setting(
            "how long a shard or rank may keep a step waiting before it is replaced (default 10)",
            group="cluster",
            metavar="N",
            least=1,
        ),
    )
    shard_spares: int = field(
        default=0,
        metadata=setting(
            "processes that wait to take the place of a lost shard",
            group="cluster",
            metavar="N",
            least=0,
        ),
    )
    # None: the engine's process has all layers. 1 does, too, with the sums of several ranks.
    tensor_parallel: int | None = field(
        default=None,
        metadata=setting(
            "processes that share the model's layers: 2, 4 or 8 (1: the same sums in one)",
            group="cluster",
            metavar="N",
            least=1,
        ),
    )
    max_running: int = field(
        default=64,
        metadata=setting(
            "sequences in one engine step",
            group="memory",
            metavar="N",
            key="max_batch_size",
            least=1,
        ),
    )
    # Fewer keep inter-token latency even while long prompts come in, more compute prompts faster.
    step_tokens: int | None = field(
        default=None,
        metadata=setting(
            "tokens computed in one step (default 512, on a GPU 4096)",
            group="memory",
            metavar="N",
            least=1,
        ),
    )
    # More of them cost less each; clients hear of their tokens together.
    steps_at_once: int = field(
        default=16,
        metadata=setting(
            "steps of decoding alone in a row, on a CPU, for 16 ms at most (1: each is told)",
            group="memory",
            metavar="N",
            least=1,
        ),
    )
    prefix_cache: bool = field(
        default=True,
        metadata=setting("prompts that begin alike share what is known of them", group="memory"),
    )
    samplers: int = field(
        default=0,
        metadata=setting(
            "decide tokens beside the forward pass (0: not)", group="sampling", metavar="N", least=0
        ),
    )
    sampler_threads: int = field(
        default=1,
        metadata=setting(
            "threads of each sampler (default 1)", group="sampling", metavar="T", least=1
        ),
    )
    sampler_placement: SamplerPlacement = field(
        default="processes",
        metadata=setting("processes (default) or ray: where samplers run", group="sampling"),
    )
    hot_vocabulary: str | None = field(
        default=None,
        metadata=setting(
            "tokens to look at first (lexshard hotset build)", group="sampling", metavar="FILE"
        ),
    )
    # A folder of the same tokenizer, or "ngram": what followed the last few tokens earlier.
    draft: str | None = field(
        default=None,
        metadata=setting(
            "folder or ORG/NAME, or ngram: changes no token",
            group="speculation",
            metavar="MODEL",
        ),
    )
    # See `VerifyMode`; a request may name another.
    verify: VerifyMode = field(
        default="same-token",
        metadata=setting(
            "same-token (default), greedy, same-distribution or sigmoid: how guesses are tested",
            group="speculation",
        ),
    )
    sigmoid_alpha: float = field(
        default=SIGMOID_LIMITS[0],
        metadata=setting("of --verify sigmoid, below 0 (default -10)", group="speculation"),
    )
    sigmoid_beta: float = field(
        default=SIGMOID_LIMITS[1],
        metadata=setting("of --verify sigmoid, above 0 (default 10)", group="speculation"),
    )
    draft_tokens: int = field(
        default=5,
        metadata=setting("longest draft (default 5)", group="speculation", metavar="N", least=1),
    )
    # "measured" goes by acceptance and costs, and guesses nothing where that does not pay;
    # "stepping" by the papers' rule; "fixed" guesses as many as it may; "auto" is "measured" where
    # lengths change no token, else "stepping", which does not go by the clock.
    draft_length: DraftLength = field(
        default="auto",
        metadata=setting(
            "auto, measured, stepping or fixed: how long each draft is", group="speculation"
        ),
    )
    # "full": all its vocabulary. "static": the tokens drawn most often. "router": the clusters that
    # its router chooses. "certified": what a certified head cannot exclude. "auto": a static list
    # where the folder has a router's file, else all.
    draft_head: DraftHeadChoice = field(
        default="auto",
        metadata=setting(
            "auto, full, static, router or certified: what a draft model looks at",
            group="speculation",
        ),
    )

    @property
    def shards_at_ranks(self) -> bool:
        """Whether each rank of the body has a shard of the head: where there are as many of both,
        and no spares that would take the place of a shard alone."""
        return self.shards == self.tensor_parallel and self.shards > 1 and not self.shard_spares

    def tokens_of_a_step(self, device: str) -> int:
        """The most tokens of a step of a body on such a ``device``, "cpu" or "cuda"."""
        return STEP_TOKENS[device] if self.step_tokens is None else self.step_tokens

    def tiers_of(self, *, on_gpu: bool) -> tuple[TierName, ...]:
        """What screens there. Raises ValueError for tiers that a GPU does not have."""
        if on_gpu and self.tiers not in ((), (GPU_TIER,)):
            raise ValueError(f"on a GPU {GPU_TIER} alone screens: leave --tier out")
        return self.tiers or ((GPU_TIER,) if on_gpu else DEFAULT_TIERS)


@dataclass(frozen=True, slots=True)
class EngineInformation:
    """What an engine decided when it started: for the banner, ``/v1/models`` and validation.

    ``threads`` are those of the steps that have most.
    """

    model: str
    dtype: str
    device: str
    body: str
    head: str
    batch_invariant: bool
    threads: int
    max_model_len: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int]
    kv_blocks: int
    kv_tokens: int
    kv_bytes: int
    parameters: int
    process_id: int
    # What a GPU is and has left, and what runs there how; empty on a CPU.
    accelerator: str = ""
    processor: str = ""  # the instructions that kernels are compiled for
    files: str = ""  # a name for the model's files as they were loaded
    head_bytes: int = 0  # of all output weights: what a head reads that looks at every one
    decisions: str = "in the engine's thread"
    drafts: str = "none"
    # Kind of step (see `actors.head.ladder.StepKind`), rows in it, screen, milliseconds.
    head_timings: tuple[tuple[str, int, str, float], ...] = ()
    # From so many rows in a step on, so many threads.
    thread_choices: tuple[tuple[int, int], ...] = ((1, 1),)
    # Rows in a step, threads, milliseconds of body and head; none where threads were given.
    thread_timings: tuple[tuple[int, int, float], ...] = ()

    @property
    def context(self) -> int:
        """How many tokens one sequence can have, prompt and output together."""
        return min(self.max_model_len, self.kv_tokens)


def check_utilization(share: float) -> None:
    """Raises ValueError for a share of a GPU's memory that cannot be."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"--gpu-memory-utilization {share} must be above 0 and at most 1")
