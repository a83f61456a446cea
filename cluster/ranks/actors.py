"""The other ranks of a body as Ray actors, on this node and others.

An actor that dies closes its connections, which all that wait for it see at once. One of this node
that has been stopped for a second (`cluster.roles.stopped`) is killed; one of another, or whose
node cannot be reached, keeps a step waiting for as long as a rank may. A node that vanishes while a
rank loads there is noticed by its silence (`notice_loss`).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from lexshard.actors.body.parallel.messages import RankMessage, RankPart
from lexshard.actors.body.parallel.parallel_body import OtherRanks
from lexshard.actors.body.parallel.sums import RankGroup, RankLostError
from lexshard.actors.role import Place
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ports import own_address
from lexshard.cluster.ranks.gang import RankGang
from lexshard.cluster.ranks.meeting import GroupMeeting, first_part, meeting_of, use_device
from lexshard.cluster.ranks.server import serve_rank
from lexshard.cluster.ranks.sockets import KEY_BYTES, greeted, heard, notice_loss
from lexshard.cluster.roles.actor import answer_of, own_node, place_in_cluster, start_actor
from lexshard.cluster.roles.stopped import LOOK_SECONDS, StoppedProcess

if TYPE_CHECKING:
    from lexshard.cluster.topology.reservation import Reservation

# An actor that does not say where it is in so long is replaced; one that starts has longer.
ANSWER_SECONDS, START_SECONDS = 1.0, 120.0
_BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class FirstRank:
    """Where the first rank hears from the others, and the key by which it knows them."""

    place: tuple[str, int]
    key: bytes
    seconds: float


class RankActor:
    """The actor: a rank, from when it is told of the first one until that has gone."""

    @ray.method(concurrency_group=_BESIDE)
    def place(self) -> Place:
        """Where it is, at once."""
        return place_in_cluster()

    def serve(self, part: RankPart, first: FirstRank) -> None:
        """See `cluster.ranks.server.serve_rank`."""
        import torch

        torch.set_num_threads(1)
        if part.device is not None:  # of several that a process sees it has this one
            use_device(part.device)
        end = greeted(first.place, first.key, part.rank, START_SECONDS)
        meeting = meeting_of(part, first.seconds, own_address(*first.place))
        link = Link(end)
        try:
            serve_rank(link, part, meeting)
        finally:
            meeting.leave()
            link.close()


class RankActors(RankGang):
    """They run where ``slots`` say, in turn, and reserve what these do. ``first`` is the part of
    the caller's rank, ``seconds`` how long a rank may keep another waiting in a step."""

    def __init__(
        self,
        first: RankPart,
        parts: Sequence[RankPart],
        slots: Sequence[Mapping[str, Any]],
        *,
        seconds: float,
    ) -> None:
        host = ray.util.get_node_ip_address()
        self._slots = slots
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(START_SECONDS)
        place = str(host), int(self._listener.getsockname()[1])
        self._first = FirstRank(place, secrets.token_bytes(KEY_BYTES), seconds)
        self._own = meeting_of(first, seconds, str(host))
        self._actors: dict[int, ActorRank] = {}
        self._told = threading.Event()
        self._closed = False
        super().__init__(parts)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, message: RankMessage) -> None:
        super().tell(message)
        self._told.set()

    def close(self) -> None:
        self._closed = True
        self._told.set()
        super().close()
        self._listener.close()

    def _watch(self) -> None:
        """Looks at the actors while a step may wait for them, which is no longer than it may."""
        while self._told.wait() and not self._closed:
            looks = int(self._first.seconds / LOOK_SECONDS)
            while looks > 0 and not self._closed:
                if self._told.is_set():
                    self._told.clear()
                    looks = int(self._first.seconds / LOOK_SECONDS)
                time.sleep(LOOK_SECONDS)
                looks -= 1
                for actor in tuple(self._actors.values()):
                    actor.look()
                    if isinstance(self._own, GroupMeeting) and actor.link.has_ended():
                        self._own.interrupt()

    def _start(self, part: RankPart) -> ActorRank:
        made = ActorRank(part, self._slots[part.rank - 1], self._first, self._listener)
        self._actors[part.rank] = made
        return made

    def _leave(self) -> None:
        self._own.leave()

    def _meet(self) -> RankGroup:
        return self._meet_by(self._own)


class ActorRank:
    """One actor, which has connected. Raises RankLostError where it does not."""

    def __init__(
        self,
        part: RankPart,
        slot: Mapping[str, Any],
        first: FirstRank,
        listener: socket.socket,
    ) -> None:
        self._actor = start_actor(RankActor, beside=[_BESIDE], **slot)
        self._actor.serve.remote(part, first)
        try:
            self.place: Place = answer_of(self._actor.place.remote(), START_SECONDS)
            while (found := heard(listener, first.key, START_SECONDS))[0] != part.rank:
                found[1].close()  # of one that was lost meanwhile
        except (PeerLostError, TimeoutError, OSError) as error:
            ray.kill(self._actor)
            raise RankLostError(f"rank {part.rank} could not be started: {error}") from error
        notice_loss(found[1])
        self._local = self.place.node == own_node()
        self._stopped = StoppedProcess(self.place.process_id)
        self.link = Link(found[1], StoppedProcess(self.place.process_id) if self._local else None)

    def look(self) -> None:
        """Kills it where it is of this node and has been stopped for good."""
        if self._local and self._stopped.look():
            self._kill()

    def answers(self) -> bool:
        try:
            answer_of(self._actor.place.remote(), ANSWER_SECONDS)
        except (PeerLostError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        self.link.close()
        if self._local and self._stopped.now():
            self._kill()
        ray.kill(self._actor)

    def _kill(self) -> None:
        """For one that has been stopped, which does not do what Ray asks of it."""
        with suppress(ProcessLookupError):
            os.kill(self.place.process_id, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RayRanks:
    """What an engine is given to start the other ranks as actors, where ``reservation`` says;
    without one anywhere, reserving nothing."""

    seconds: float
    reservation: Reservation | None = None

    def __call__(self, parts: Sequence[RankPart]) -> OtherRanks:
        nowhere: list[Mapping[str, Any]] = [{}] * len(parts)
        slots = nowhere if self.reservation is None else list(self.reservation.ranks)
        first = first_part(parts)
        if self.reservation is not None and first.device not in (None, "cpu"):
            # Ray gives GPUs away, and a process sees its own alone.
            first, *parts = (replace(part, device="cuda:0") for part in (first, *parts))
        return RankActors(first, parts, slots, seconds=self.seconds)
