"""Leaving a Ray cluster: nothing that this program started there stays, nothing of others goes."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

# An application, then Serve, end within a second each on a machine that is not overloaded; what
# has not ended by then is killed.
END_SECONDS = 5.0
LOOK_SECONDS = 0.1


def end_serve(application: str) -> tuple[str, ...]:
    """Ends ``application`` and the Ray Serve that this program started; where others have put
    applications into it meanwhile, Serve goes on for them, and their names are returned."""
    from ray import serve
    from ray.serve.context import _get_global_client

    _end_quietly()
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:  # it has not come so far
        return ()
    serve.delete(application, _blocking=False)
    deadline = time.monotonic() + END_SECONDS
    while application in (left := set(serve.status().applications)):
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    others = tuple(sorted(left - {application}))
    if not others:
        client.shutdown(timeout_s=END_SECONDS)
        kill_own_actors("serve")
    return others


def _end_quietly() -> None:
    """Ray would tell, in red, of every call to an actor that is now ended on purpose, among them
    the one that ends Serve, and of "infinite retries" that never begin."""
    from ray._private import worker

    def tell_nobody(*_: Any, **__: Any) -> None:
        pass

    # By this name errors of the cluster are printed; what processes print has a way of its own.
    worker.print_to_stdstream = tell_nobody


def leave_ray() -> None:
    """Ends the engine, where it has not ended by itself. The connection ends with the process: to
    take leave, `ray.shutdown`, may take twenty seconds where a node of the cluster was lost."""
    from lexshard.cluster.engine.ray_actor import NAMESPACE

    kill_own_actors(NAMESPACE)


def abandon_ray() -> None:
    """Ends what this program has started in a cluster so far, from any thread."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _end_quietly()
        kill_own_actors()


def kill_own_actors(namespace: str | None = None) -> None:
    """Kills the named actors of this program, those that its actors have started among them, in one
    ``namespace`` or in all. Actors without names end with their owner."""
    import ray
    from ray._private.state import actors

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    own = {each["Name"] for each in actors(job_id=job).values() if each["State"] != "DEAD"}
    found = [
        (each["name"], each["namespace"])
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"] in own and namespace in (None, each["namespace"])
    ]
    for name, where in sorted(found):  # Serve's controller first, which would replace the others
        with suppress(ValueError):  # it has just ended
            ray.kill(ray.get_actor(name, where))
