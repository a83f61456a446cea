"""The engine in a process of its own, which it shares with nothing else.

Beside a busy Python thread a 3 ms step became 13 ms, so HTTP, tokenisation and detokenisation live
in API processes. `cluster.engine.main` is that process, `cluster.engine.ray_actor` the same as a
Ray actor.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.faults import LoggedFault, listen_for_faults
from lexshard.actors.machine import begin_to_load, settle
from lexshard.actors.role import RunningRole
from lexshard.cluster.engine.handle import EngineLocation
from lexshard.cluster.engine.proof import prove_apart
from lexshard.cluster.engine.transport import EngineSide
from lexshard.cluster.private_folder import PrivateFolder, remove_abandoned_folders
from lexshard.cluster.process_tree import die_with_parent

Tell = Callable[[str], None]


class EngineProcess:
    """Loads and warms an engine and serves it to every API process that connects.

    It outlives the API process that needed it first: loading a model takes longer than starting
    one of those. It ends when the last of those it served has asked for nothing more. All but
    ``serve`` may be asked from any thread.
    """

    def __init__(self, configuration: EngineConfiguration) -> None:
        die_with_parent()
        logging.basicConfig()  # with a listener of its own a logger would no more write to stderr
        listen_for_faults()
        self._configuration = configuration
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._crash: BaseException | None = None  # of an engine that was ready
        self._begun = False
        self._side: EngineSide | None = None
        self._location: EngineLocation | None = None
        self._engine: Any = None

    def serve(self) -> bool:
        """Load the model, compile every kernel, serve; the first call does it, and is the one that
        returns True, when the engine has been told to stop.

        Raises:
            Exception: what the loader raised, or the engine in its last moment, in any thread.
        """
        failure = self._failure or self._crash
        if failure is not None:
            raise failure
        if self._begun:
            return False
        self._begun = True
        try:
            engine = self._engine = self.load(self._configuration)
            remove_abandoned_folders()  # of engines that were killed
            folder = PrivateFolder()
            side = self._side = EngineSide(folder.path / "engine")
            self._location = EngineLocation(engine.information, str(folder.path / "engine"))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._settled.set()
        try:
            from lexshard.actors.engine.loop import run_engine

            run_engine(engine, side, side.emit, asked=side.asked)
        except BaseException as error:
            self._crash = error
            raise
        finally:
            side.close()
            engine.close()
            folder.remove()
        return True

    @property
    def ready(self) -> bool:
        """Whether an engine was made."""
        return self._location is not None

    @property
    def deserted_seconds(self) -> float | None:
        """How long no client has been connected; None before one could."""
        if self._side is not None:
            return self._side.deserted_seconds
        return None if self._failure is None else float("inf")

    def load(self, configuration: EngineConfiguration) -> Any:
        """An engine that is warm."""
        begin_to_load()
        started = time.monotonic()

        def tell(phase: str) -> None:
            with suppress(OSError):  # what read the log may have gone
                print(f"[{time.monotonic() - started:5.1f} s] engine: {phase}", flush=True)

        if not sys.stderr.isatty():  # a log holds no progress bars; tqdm looks when it is imported
            os.environ.setdefault("TQDM_DISABLE", "1")
        # torch and numba load here, in no other process
        from lexshard.actors.engine.start import kernels_ahead as ahead
        from lexshard.kernels.ahead import GUESSING, is_postponed, postpone
        from lexshard.kernels.cached_code import load_code_alone

        load_code_alone()
        with prove_apart(configuration, tell):
            later = ahead.compile_kernels(configuration, tell)
        postpone(later)
        engine = self.make(configuration, tell)
        engine.warm_up()
        if later:
            tell(
                "serving; drafts begin when their kernels are compiled"
                if is_postponed(GUESSING)
                else "serving; kernels that make it faster are still compiled"
            )
            ahead.compile_later(later)
        settle()
        return engine

    def make(self, configuration: EngineConfiguration, tell: Tell) -> Any:
        """An engine with all that its configuration says on this machine."""
        from lexshard.actors.engine.engine import Engine
        from lexshard.cluster.ranks.processes import RankProcesses
        from lexshard.cluster.ranks.shards import RankShards
        from lexshard.cluster.samplers.start import start_sampler

        ranks = partial(RankProcesses, seconds=float(configuration.shard_seconds))
        shards = RankShards(configuration) if configuration.shards_at_ranks else None
        return Engine(configuration, start_sampler, None, shards, tell, ranks)

    def locate(self) -> EngineLocation | None:
        """Where to connect, as soon as there is an engine.

        Raises:
            Exception: what the loader raised.
        """
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._location

    def roles(self) -> Sequence[RunningRole]:
        """The roles and where they are; empty before there is an engine."""
        return [] if self._engine is None else list(self._engine.roles())

    def faults(self) -> list[LoggedFault]:
        """What has gone wrong last in this process."""
        return listen_for_faults().told()
