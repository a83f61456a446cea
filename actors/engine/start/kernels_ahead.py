"""The compiled kernels that an engine needs, in the cache before it is made."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lexshard.actors.body.errors import ModelRefusedError
from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.messages import BY_DISTRIBUTION
from lexshard.actors.stored_tensors import StoredTensor, stored_tensors
from lexshard.kernels.ahead import (
    GUESSING,
    ONE_CALL,
    SEVERAL_STEPS,
    WHOLE_ROWS,
    compile_ahead,
    compile_beside,
    is_postponed,
)
from lexshard.kernels.ahead.calls import Call, Groups, missing_calls, read_calls
from lexshard.kernels.linear.compact import should_be_compact
from lexshard.kernels.processor import has_feature
from lexshard.kernels.team.cores import available_cores

logger = logging.getLogger("lexshard.engine")

TOLD_EVERY = 10.0  # seconds, where there is no terminal for a progress bar
BODY = "lexshard.kernels.llama.cpu:forward"
# The group of what makes weights compact, and how both have them in their arguments then.
COMPACT, PLAIN_TYPE, COMPACT_TYPE = "compact", "uint32[4C]", "uint8[4C]"
PRODUCTS = "_proj.weight"  # of layers, by the ends of their names


def compile_kernels(configuration: EngineConfiguration, tell: Callable[[str], None]) -> Groups:
    """Compile what an engine of this ``configuration`` will call and the cache lacks, on all cores
    that this process may use. Returns what no first token needs, for `postpone` and
    `compile_later`.

    ``tell`` hears how far it is, unless a terminal shows a progress bar. What it leaves out is
    compiled when it is first called.
    """
    groups, later = _apart(missing_calls(calls_of(configuration)), configuration)
    total = sum(map(len, groups.values()))
    if total:
        with _Progress(total, tell) as progress:
            compile_ahead(groups, available_cores(), progress.advance)
    return later


def compile_later(groups: Groups) -> None:
    """Compile ``groups`` beside what is served, in a process of the lowest priority."""

    def compile_and_load() -> None:
        try:
            compile_beside(groups)
        except OSError as error:  # no process could be started
            logger.warning("no process compiles kernels beside: %s", error)
        if any(is_postponed(call.function) for calls in groups.values() for call in calls):
            logger.warning("not all kernels could be compiled: steps take longer until a restart")

    threading.Thread(target=compile_and_load, name="compiling", daemon=True).start()


def _apart(groups: Groups, configuration: EngineConfiguration) -> tuple[Groups, Groups]:
    """What is needed for a first token, and what is not (`kernels.ahead`). Tokens of guesses that
    are tested by distributions depend on them: these are needed from the first on."""
    can_wait = {ONE_CALL, SEVERAL_STEPS}
    # A certified head drafts by other kernels, which a warm-up compiles.
    if configuration.verify not in BY_DISTRIBUTION and configuration.draft_head != "certified":
        can_wait.add(GUESSING)
    if configuration.samplers == 0 and configuration.hot_vocabulary is None:
        can_wait.add(WHOLE_ROWS)
    now: Groups = {}
    later: Groups = {}
    for name, calls in groups.items():
        for call in calls:
            part = later if call.function in can_wait else now
            part.setdefault(name, []).append(call)
    return now, later


def calls_of(configuration: EngineConfiguration) -> Groups:
    """The calls that are known, less those that this configuration on this machine does not make:
    of a draft model or ranks it does not have, of weights of the other storage type, on a GPU."""
    import torch

    on_gpu = configuration.device.startswith("cuda") or (
        configuration.device == "auto" and torch.cuda.is_available()
    )
    if on_gpu or not _stored_as_bfloat16(configuration):
        return {}
    drafts = configuration.draft not in (None, NGRAM)

    def needed(call: Call) -> bool:
        if call.folder == "draft":
            return drafts
        ranks, fused = configuration.tensor_parallel is not None, configuration.body != "general"
        if call.folder == "parallel":
            return ranks and fused
        if call.folder == "steps":
            return fused and not ranks and configuration.samplers == 0
        return "signed_bytes" not in call.function or has_feature("avx512vnni")

    groups = {name: list(filter(needed, calls)) for name, calls in read_calls().items()}
    if not _will_be_compact(configuration):
        groups.pop(COMPACT, None)
    else:
        groups = {name: list(_of_compact(calls, drafts)) for name, calls in groups.items()}
    return {name: calls for name, calls in groups.items() if calls}


def _will_be_compact(configuration: EngineConfiguration) -> bool:
    """Whether a fused body will keep its weights so (`kernels.linear.compact`)."""
    if configuration.tensor_parallel is not None or configuration.body == "general":
        return False
    stored = _stored(configuration)
    return should_be_compact(2 * sum(each.size for each in stored if each.name.endswith(PRODUCTS)))


def _of_compact(calls: Iterable[Call], drafts: bool) -> Iterator[Call]:
    """The calls of a body with compact weights; a draft model's mostly are too small for that."""
    for call in calls:
        if call.function not in (BODY, SEVERAL_STEPS):
            yield call
            continue
        if call.function == BODY and drafts:
            yield call
        own = [COMPACT_TYPE if each == PLAIN_TYPE else each for each in call.arguments]
        yield Call(call.function, own)


def _stored_as_bfloat16(configuration: EngineConfiguration) -> bool:
    """Whether the weights will be kept as bfloat16: the calls that are known are of those."""
    if configuration.dtype != "auto":
        return configuration.dtype == "bfloat16"
    return {tensor.dtype for tensor in _stored(configuration)} == {"BF16"}


def _stored(configuration: EngineConfiguration) -> list[StoredTensor]:
    """What the model's folder holds; nothing where it cannot be read: loading it says why."""
    try:
        return stored_tensors(Path(configuration.model).expanduser())
    except ModelRefusedError:
        return []


class _Progress:
    """A progress bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, desc="engine: compiling kernels, once", disable=None)
        self._total, self._done, self._tell = total, 0, tell
        self._tell_again()

    def advance(self, count: int) -> None:
        self._done += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() - self._told >= TOLD_EVERY:
            self._tell_again()

    def _tell_again(self) -> None:
        self._told = time.monotonic()
        if self._bar.disable:
            self._tell(f"compiling kernels, {self._done} of {self._total}, once on this machine")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
