"""What an engine must know to start: plain data, validated at the edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataType = Literal["float32", "bfloat16", "auto"]
BodyChoice = Literal["auto", "fused", "general"]
Device = Literal["auto", "cpu", "cuda"]
TierName = Literal["int8", "int4", "int4-dither", "1-bit"]
# Their bounds hold always; those of the other two with a stated probability.
DEFAULT_TIERS: tuple[TierName, ...] = ("int8", "int4")
HeadChoice = Literal["auto", "certified", "paper", "dense"]
SamplerPlacement = Literal["threads", "processes", "ray"]


@dataclass(frozen=True, slots=True)
class EngineConfiguration:
    """Settings of one engine.

    ``device`` is where the body computes; "auto" takes a GPU where there is one.
    ``head`` says how tokens are found, which does not change them: "certified" screens with
    low-precision copies of the output weights, "dense" with the weights, "auto" with what is
    fastest here, "paper" with CSV-Decode's cluster bounds. ``tiers`` are the copies to choose from:
    "int4-dither" and "1-bit" have certificates that hold with a stated probability. ``index`` is
    the file of those copies and clusters (see ``lexshard index``); None looks beside the model, and
    builds what is missing.
    ``kv_cache_bytes`` None takes what ``max_running`` sequences of full length need, at most a
    tenth of the machine's memory. ``threads`` None is one thread per core,
    one core left to HTTP. ``step_tokens`` bounds
    the tokens computed in one step: a smaller value keeps inter-token latency even while long
    prompts come in, a larger one computes prompts faster.
    ``samplers`` decide tokens beside the next step's forward pass, with ``sampler_threads`` each;
    0 decides in the engine's own thread, between the steps. ``sampler_placement`` says where they
    run. ``hot_vocabulary`` is the file of tokens to look at first (see ``lexshard hotset``).
    """

    model: str
    dtype: DataType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    threads: int | None = None
    body: BodyChoice = "auto"
    fast_prefill: bool = False
    head: HeadChoice = "auto"
    tiers: tuple[TierName, ...] = DEFAULT_TIERS
    index: str | None = None
    max_running: int = 64
    step_tokens: int = 512
    prefix_cache: bool = True
    samplers: int = 0
    sampler_threads: int = 1
    sampler_placement: SamplerPlacement = "processes"
    hot_vocabulary: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInformation:
    """What an engine decided when it started: for the banner, ``/v1/models`` and validation."""

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
    decisions: str = "in the engine's thread"
    # Kind of step (see `actors.head.ladder.StepKind`), rows in it, screen, milliseconds.
    head_timings: tuple[tuple[str, int, str, float], ...] = ()
