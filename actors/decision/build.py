"""The decision plane an engine's configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from lexshard.actors.configuration import EngineConfiguration, SamplerPlacement
from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.plane import DecisionPlane, SamplerHandle
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.decision.warm_up import warm_up_work
from lexshard.actors.states.sequence_state import SequenceStates

if TYPE_CHECKING:
    import numpy.typing as npt

# Starts a sampler outside of this process; the cluster layer knows how. Once the event is set
# it is not waited for any more.
StartSampler = Callable[[SamplerSettings, SamplerPlacement, Event], SamplerHandle]


def sampler_settings(
    configuration: EngineConfiguration, vocabulary_size: int, eos_ids: tuple[int, ...]
) -> SamplerSettings:
    """What each of an engine's samplers must know to start."""
    tokenizer = None
    if configuration.hot_vocabulary is not None:
        from lexshard.actors.decision.hot_vocabulary.file import tokenizer_hash

        tokenizer = tokenizer_hash(configuration.model)
    return SamplerSettings(
        vocabulary_size,
        eos_ids,
        threads=configuration.sampler_threads,
        capacity=-(-configuration.max_running // max(configuration.samplers, 1)),
        hot_vocabulary=configuration.hot_vocabulary,
        tokenizer=tokenizer,
        sigmoid=(configuration.sigmoid_alpha, configuration.sigmoid_beta),
    )


def build_plane(
    settings: SamplerSettings,
    configuration: EngineConfiguration,
    states: SequenceStates,
    start_sampler: StartSampler | None,
) -> DecisionPlane | OwnDecisions:
    """Without samplers of their own, sequences are decided in the engine's thread, from the
    engine's own ``states``. Raises ValueError for samplers that cannot be started, and what
    starting them raises."""
    if configuration.samplers == 0:
        return OwnDecisions(Sampler(settings, states, hot_ids(settings)), states)
    closing = Event()
    if start_sampler is None:
        raise ValueError("samplers are started by the cluster layer: give start_sampler")
    start = partial(start_sampler, settings, configuration.sampler_placement, closing)
    substitute = partial(_substitute, settings)
    size = settings.vocabulary_size
    return DecisionPlane(start, configuration.samplers, substitute, size, closing=closing)


def hot_ids(settings: SamplerSettings) -> npt.NDArray[np.int32] | None:
    """The tokens [H] to visit first, sorted by id: as many as pay on this machine, None if none
    do. Raises what `read_hot_file` raises."""
    if settings.hot_vocabulary is None:
        return None
    # Not needed, nor what they need installed, everywhere.
    from lexshard.actors.decision.hot_vocabulary.file import read_hot_file
    from lexshard.actors.decision.hot_vocabulary.sizes import (
        calibrate,
        size_that_pays,
        synthetic_decider,
    )

    size = settings.vocabulary_size
    hot = read_hot_file(settings.hot_vocabulary, size, settings.tokenizer)
    curve = hot.curve
    pays = size_that_pays(curve, calibrate(synthetic_decider(size), hot.ids, curve.sizes), size)
    return np.sort(hot.ids[:pays]) if pays else None


def _substitute(settings: SamplerSettings) -> SamplerHandle:
    """Warm, since it is needed at once when it is needed."""
    rows = np.zeros((2, settings.vocabulary_size), np.float32)
    Sampler(settings).decide(warm_up_work(rows))
    return InlineSampler(Sampler(settings))
