"""Joining a Ray cluster that others run: what is refused before anything starts there."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from lexshard.cluster.config_sources import PROCESSOR

ANSWER_SECONDS = 60.0
CONNECT_SECONDS = 5.0
SERVE_CONTROLLER, SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"


class JoinError(RuntimeError):
    """A cluster that cannot be joined, with one line that says what to do."""


class Versions(NamedTuple):
    """What all nodes of a cluster must agree on; None is missing."""

    lexshard: str | None
    ray: str
    python: str


class Node(NamedTuple):
    """What a node says of itself."""

    versions: Versions
    has_amx: bool | None  # None where it has no CPUs for anything to compute


def join_ray(address: str, environment: Mapping[str, str], bodies_on: str = "cuda") -> bool:
    """Connects this process to the cluster at ``address`` (``auto``: the one of this machine), of
    which this machine must be the head; returns whether it is guarded, by a token or by TLS.

    All that is started from here on finds ``environment``, and the processor that this process is
    told to be. ``bodies_on``: see `two_orders`. Ray Serve reads its environment when it is
    imported, so nothing may import it before this call. Raises JoinError.
    """
    if os.environ.get(PROCESSOR):
        environment = {**environment, PROCESSOR: os.environ[PROCESSOR]}
    os.environ.update(environment)
    import ray

    is_guarded = _look_at(address)

    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": dict(environment)},
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
    except (ConnectionError, ValueError) as error:
        raise _no_cluster(address) from error
    except RuntimeError as error:  # versions, among others
        reason = " ".join(str(error).split())
        raise JoinError(f"cannot join the Ray cluster at {address}: {reason}") from error
    try:
        _check_head()
        _check_nobody_serves()
        nodes = ask_nodes()
        versions = {name: node.versions for name, node in nodes.items()}
        complaint = mismatch(own_versions(), versions) or two_orders(nodes, bodies_on)
        if complaint is not None:
            raise JoinError(complaint)
    except BaseException:
        ray.shutdown()
        raise
    return is_guarded


def _look_at(address: str) -> bool:
    """Whether the cluster is guarded; Ray itself would go on trying for minutes where there is
    none, and for some without the right token."""
    import grpc
    from ray._private import grpc_utils, services
    from ray.exceptions import AuthenticationError

    try:
        found = services.canonicalize_bootstrap_address_or_die(address)
    except (OSError, ValueError) as error:  # there is none of this machine, or it is no address
        raise _no_cluster(address) from error
    options = [("grpc.enable_http_proxy", 0)]
    # With Ray's TLS both sides show certificates.
    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    refusal = grpc.StatusCode.UNAUTHENTICATED
    if not has_tls:
        refusal = _refusal(grpc.insecure_channel(found, options))
    is_guarded = refusal is grpc.StatusCode.UNAUTHENTICATED
    if is_guarded:
        with suppress(AuthenticationError):  # this process has no token at all
            refusal = _refusal(grpc_utils.init_grpc_channel(found, options))
    if refusal is grpc.StatusCode.UNAUTHENTICATED:
        raise JoinError(
            f"the Ray cluster at {address} asks for its token: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH where the token is not in ~/.ray/auth_token"
        )
    if refusal is not None:
        raise _no_cluster(address)
    return is_guarded


def _refusal(channel: Any) -> Any:
    """The status with which what is at the other end refuses to be a cluster's GCS; None: it is
    one."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with channel:
        try:
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(
                gcs_service_pb2.CheckAliveRequest(), timeout=CONNECT_SECONDS
            )
        except grpc.RpcError as error:
            return error.code()
    return None


def _no_cluster(address: str) -> JoinError:
    return JoinError(
        f"no Ray cluster answers at {address}: start one with `ray start --head`, give the port of "
        "its GCS (6379, unless --port said another one) and not that of its dashboard, or leave "
        "--address out"
    )


def own_raylet() -> psutil.Process:
    """The process of the Ray node that this one is connected to."""
    import ray

    socket = ray._private.worker.global_worker.node.raylet_socket_name
    return next(
        process
        for process in psutil.process_iter()
        if f"--raylet_socket_name={socket}" in _command(process)
    )


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it has just ended
        return []
    return command


def own_versions() -> Versions:
    import ray

    return Versions(_installed(), ray.__version__, platform.python_version())


def mismatch(own: Versions, nodes: Mapping[str, Versions]) -> str | None:
    """What is wrong with the first of ``nodes`` that is not like this one; None: nothing."""
    for node, found in nodes.items():
        for name, mine, theirs in zip(Versions._fields, own, found, strict=True):
            if mine != theirs:
                return (
                    f"node {node} has {f'{name} {theirs}' if theirs else f'no {name}'}, this one "
                    f"{mine}: install the same on all nodes"
                )
    return None


def two_orders(nodes: Mapping[str, Node], bodies_on: str) -> str | None:
    """What is wrong if just some of ``nodes`` have AMX, with which products of bfloat16 are added
    up in another order; None: nothing, or all are told which order to take.

    ``bodies_on`` is the device, as a configuration says it, of bodies that round to bfloat16 on
    several nodes, "cuda" where there are none.
    """
    import ray

    names = {has: [name for name in nodes if nodes[name].has_amx is has] for has in (True, False)}
    gpus = bodies_on == "cuda" or (bodies_on == "auto" and "GPU" in ray.cluster_resources())
    if gpus or os.environ.get(PROCESSOR) or not names[True] or not names[False]:
        return None
    return (
        f"in bfloat16 a seed has other tokens on node {names[True][0]}, which has AMX, than on "
        f"{names[False][0]}, which has none: set the variable {PROCESSOR} to vectors for all, so "
        "that none uses it, or dtype to float32, or take nodes of one kind"
    )


def _installed() -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("lexshard")
    return None


def _check_head() -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    [head] = [node for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    if head["NodeID"] != here:
        raise JoinError(
            f"this machine is not the head of the cluster, where Ray Serve's ingress is: run "
            f"lexshard serve on {head['NodeManagerAddress']}"
        )


def _check_nobody_serves() -> None:
    import ray

    try:
        ray.get_actor(SERVE_CONTROLLER, SERVE_NAMESPACE)
    except ValueError:
        return
    from ray import serve

    names: Sequence[str] = sorted(serve.status().applications)
    who = "another lexshard server" if "lexshard" in names else "Ray Serve"
    raise JoinError(
        f"{who} runs in this cluster already (applications: {', '.join(names) or 'none'}), and "
        "there is one ingress in a cluster: deploy to it with `serve deploy` and import_path "
        "lexshard.serve_app.build:app, or end it with `serve shutdown`, or leave --address out for "
        "a Ray of its own"
    )


def ask_nodes() -> dict[str, Node]:
    """What the nodes of this process's cluster say, by address. Raises JoinError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pickled as it stands, because nodes may have no lexshard, or another one.
    def told() -> tuple[tuple[str | None, str, str], bool]:
        import importlib.metadata
        import platform
        from pathlib import Path

        import ray

        # As the system tells it; one that keeps AMX from its processes is taken to have it.
        processor = Path("/proc/cpuinfo")
        has_amx = processor.exists() and "amx_bf16" in processor.read_text()

        try:
            found: str | None = importlib.metadata.version("lexshard")
        except importlib.metadata.PackageNotFoundError:
            found = None
        return (found, ray.__version__, platform.python_version()), has_amx

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(told)
    alive = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in alive
    ]
    try:
        answers = ray.get(asked, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise JoinError(
            f"not every node of the cluster answers within {ANSWER_SECONDS:g} s: see `ray status`"
        ) from error
    return {
        node["NodeManagerAddress"]: Node(
            Versions(*versions), has_amx if "CPU" in node["Resources"] else None
        )
        for node, (versions, has_amx) in zip(alive, answers, strict=True)
    }
