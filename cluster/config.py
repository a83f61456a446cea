"""The options of a server, each declared once: the engine's in ``EngineConfiguration``, the others
as fields of ``ServeConfig``.

``OPTIONS``, group by group, is what the file, the environment and the command line
(`cluster.config_sources`), the schema for editors and `lexshard config` read there.
"""

from __future__ import annotations

import os
import types
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ByteSize, ConfigDict, Field, create_model

from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.setting import settings_of
from lexshard.cluster.ingress import LARGEST_BODY
from lexshard.cluster.models.names import hub_name

VARIABLE_PREFIX = "LEXSHARD_"
# Options that name a file or a folder which other processes read.
PATHS = (
    *("model", "draft", "index", "hot_vocabulary"),
    *("shard_trace", "score_template", "receipt_key", "ssl_certfile", "ssl_keyfile"),
)
# What options are listed under, everywhere in this order: `lexshard serve --help=NAME`, its title.
GROUPS = {
    "model": "Model",
    "memory": "KV cache and batches",
    "head": "Output head",
    "sampling": "Sampling plane",
    "speculation": "Speculation",
    "cluster": "Cluster, shards, replicas",
    "http": "HTTP, keys, TLS",
    "limits": "Limits",
    "logs": "Logs, traces, metrics",
}

# The names of `serve_app.tools.families`, which is above this layer.
ToolFormat = Literal["qwen3-coder", "hermes", "mistral-named", "mistral", "llama3", "json"]
Name = Annotated[str, Field(pattern=r"\S")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^\s/]+)$")]
RootPath = Annotated[str, Field(pattern=r"^(/[^/\s]+)+$")]
Url = Annotated[str, Field(pattern=r"^https?://\S+$")]
# An empty key would open the server to every client that sends an empty one, and clients send
# other letters in encodings of their own.
Key = Annotated[str, Field(pattern=r"^[!-~]+( +priority=-?[0-9]{1,9})?$")]


def option(
    default: Any,
    description: str,
    *,
    group: str,
    metavar: str | None = None,
    flag: str | None = None,
    secret: bool = False,
    **rules: Any,
) -> Any:
    """A field of ``ServeConfig``.

    Its key is the ``alias`` among the ``rules`` (which are pydantic's), else its name; ``group`` is
    one of ``GROUPS``. ``flag`` and ``metavar`` are the command line's words where the key does not
    give them. What is ``secret`` has no flag, for every user can list the processes of a machine,
    and is never shown.
    """
    words: dict[str, Any] = {"metavar": metavar, "flag": flag, "secret": secret, "group": group}
    return Field(default, description=description, json_schema_extra=words, **rules)


def _cpus(default: float | None, description: str) -> Any:
    return option(default, description, group="cluster", metavar="N", gt=0, allow_inf_nan=False)


def _share_of_gpu() -> Any:
    told = "share of one GPU (default: 1 where nodes have GPUs)"
    return option(None, told, group="cluster", metavar="SHARE", ge=0, le=1)


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def _engine_options() -> dict[str, Any]:
    """The fields of ``ServeConfig`` that ``EngineConfiguration`` declares."""
    kinds: dict[str, Any] = get_type_hints(EngineConfiguration)
    defaults: dict[str, Any] = {item.name: item.default for item in fields(EngineConfiguration)}
    options: dict[str, Any] = {}
    for name, told in settings_of(EngineConfiguration).items():
        kind, default = kinds[name], defaults[name]
        rules: dict[str, Any] = {"alias": told.key} if told.key else {}
        if told.least is not None:
            rules["ge"] = told.least
        if get_origin(kind) is tuple:
            kind, default = types.GenericAlias(list, get_args(kind)[0]), list(default)
        if told.in_bytes:
            kind = ByteSize | None
        value = ... if default is MISSING else default
        declared = option(
            value, told.description, group=told.group, metavar=told.metavar, flag=told.flag, **rules
        )
        options[name] = (kind, declared)
    return options


EngineOptions: Any = create_model("EngineOptions", __config__=STRICT, **_engine_options())


class ServeConfig(EngineOptions):
    """Everything ``lexshard serve`` can be told: the settings of its engine, under the names they
    have in ``EngineConfiguration``, which declares them and says more, and those of the server.

    ``max_running`` bounds the sequences of one engine step; ``max_running_requests`` the sequences
    admitted at all, and ``max_waiting_tokens`` their prompt tokens that still wait to be computed.
    """

    backend: Literal["auto", "process", "ray"] = option(
        "auto",
        "process: plain processes of this machine; ray: actors of a Ray cluster behind Ray Serve; "
        "auto: ray where an option needs it",
        group="cluster",
    )
    address: str | None = option(
        None,
        "of the Ray cluster to join, HOST:PORT or auto (default: a Ray of its own)",
        group="cluster",
        metavar="ADDRESS",
    )
    dashboard: bool = option(
        False, "start Ray's dashboard and agents, too, with a Ray of its own", group="cluster"
    )
    reserve: bool = option(
        False, "reserve CPUs and GPUs for every process (always when joining)", group="cluster"
    )
    placement_seconds: int = option(
        60,
        "how long to wait for room in a cluster that is joined",
        group="cluster",
        metavar="N",
        ge=0,
    )
    cpus_per_body: float | None = _cpus(
        None, "that the engine's process reserves (default: --threads, else 1)"
    )
    cpus_per_shard: float = _cpus(1.0, "that each shard reserves (default 1)")
    cpus_per_sampler: float | None = _cpus(
        None, "that each sampler reserves (default: its threads)"
    )
    cpus_per_drafter: float = _cpus(1.0, "that a drafter reserves (default 1)")
    gpus_per_body: float | None = _share_of_gpu()
    gpus_per_shard: float | None = _share_of_gpu()
    served_model_name: list[Name] = option(
        [], "name for clients; repeatable", group="model", metavar="NAME"
    )
    revision: Name | None = option(
        None,
        "branch, tag or commit of a model on the Hub (default main)",
        group="model",
        metavar="REVISION",
    )
    tool_format: ToolFormat | None = option(
        None,
        "how the model writes calls of tools (default: found from the checkpoint)",
        group="model",
        metavar="NAME",
    )
    score_labels: list[Name] = option(
        [],
        "text of one token, repeatable: scores of pairs are the first one's share of all",
        group="model",
        metavar="TEXT",
        flag="--score-label",
    )
    score_template: str | None = option(
        None,
        "Jinja file that asks for such a label about a query and a document",
        group="model",
        metavar="FILE",
    )
    host: Name = option(
        "127.0.0.1", "to listen on (default 127.0.0.1)", group="http", metavar="ADDRESS"
    )
    port: int = option(8000, "port to listen on (default 8000)", group="http", ge=1, le=65535)
    api_processes: int = option(
        1,
        "processes that speak HTTP and tokenise, before one engine",
        group="http",
        metavar="N",
        ge=1,
        le=64,
    )
    replicas: int = option(
        1,
        "servers behind one address, each with an engine of its own",
        group="cluster",
        metavar="N",
        ge=1,
        le=64,
    )
    max_replicas: int | None = option(
        None,
        "as many replicas while requests wait, --replicas of them at least",
        group="cluster",
        metavar="N",
        ge=1,
        le=64,
    )
    target_ongoing_requests: int = option(
        16, "of a replica: with more of them others are started", group="cluster", metavar="N", ge=1
    )
    routing: Literal["prefix", "load"] = option(
        "prefix",
        "prefix (default: what begins alike to the same replica, unless it has too many) or load",
        group="cluster",
    )
    api_keys: list[Key] = option(
        [],
        "keys of clients; 'KEY priority=-5' lets its owner go as far before the default",
        group="http",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "keys of clients, one a line (without: open to all)", group="http", metavar="FILE"
    )
    max_running_requests: int = option(
        256, "sequences admitted at once", group="limits", metavar="N", ge=1
    )
    max_waiting_tokens: int = option(
        131_072, "prompt tokens that may wait", group="limits", metavar="N", ge=1
    )
    max_requests_per_client: int | None = option(
        None, "open requests of one client", group="limits", metavar="N", ge=1
    )
    edge_sessions: int = option(
        256,
        "texts of edge devices at once, of each API process (0: none)",
        group="limits",
        metavar="N",
        ge=0,
    )
    edge_resume_seconds: int = option(
        30, "how long a lost device's text is kept", group="limits", metavar="N", ge=1
    )
    max_body_bytes: int = option(
        LARGEST_BODY, "largest body of a request", group="limits", metavar="BYTES", ge=1024
    )
    cors_origins: list[Origin] = option(
        [],
        "web pages of this origin may ask from browsers ('*': all); repeatable",
        group="http",
        metavar="ORIGIN",
        flag="--cors-origin",
    )
    root_path: RootPath | None = option(
        None, "path under which a reverse proxy serves this server", group="http", metavar="PATH"
    )
    ssl_certfile: str | None = option(
        None,
        "certificate (PEM, with its chain): HTTPS instead of HTTP",
        group="http",
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None, "private key (PEM) of the certificate", group="http", metavar="FILE"
    )
    receipt_key: str | None = option(
        None, "private key (PEM, Ed25519) that signs receipts", group="http", metavar="FILE"
    )
    playground: bool | None = option(
        None, "a page to try the model on, at / (default: on loopback)", group="http"
    )
    playground_kills: bool | None = option(
        None,
        "buttons there that kill the engine and its helpers (default: on loopback)",
        group="http",
    )
    log_format: Literal["text", "json"] = option(
        "text", "text or json (one object a line)", group="logs", metavar="FORMAT"
    )
    otlp_traces_endpoint: Url | None = option(
        None,
        "OpenTelemetry collector (OTLP over HTTP) for spans of requests",
        group="logs",
        metavar="URL",
    )
    vllm_metrics: bool = option(
        False, "metrics that gateways know by vLLM's names, under these names, too", group="logs"
    )
    shutdown_grace_seconds: int = option(
        5,
        "time for open streams to end when the server is told to",
        group="limits",
        metavar="N",
        ge=0,
    )

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use: the given ones, else the name of the model's folder."""
        return tuple(self.served_model_name) or (Path(self.model).resolve().name,)

    def with_absolute_paths(self) -> ServeConfig:
        """For processes that may run in another folder and know no ``~``. Names on the Hub stay."""
        told = {name: getattr(self, name) for name in PATHS}
        paths = {name: os.path.expanduser(path) for name, path in told.items() if path is not None}
        absolute = {
            name: str(Path(path).absolute())
            for name, path in paths.items()
            # A ``~`` that is left is of a home that is not there.
            if (name, path) != ("draft", NGRAM)
            and not (name in ("model", "draft") and path[:1] not in ("", "~") and hub_name(path))
        }
        return self.model_copy(update=absolute)

    @property
    def on_loopback(self) -> bool:
        """Whether only programs of this machine reach the server."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def has_playground(self) -> bool:
        """Whether there is a page at ``/``."""
        return self.on_loopback if self.playground is None else self.playground

    @property
    def lets_page_kill(self) -> bool:
        """Whether that page may kill processes of the engine. Without being asked on loopback
        alone, and where nothing says that strangers come there: no keys, no proxy's path."""
        asked = self.playground_kills
        if asked is None:
            asked = self.on_loopback and not (self.root_path or self.api_keys or self.api_key_file)
        return self.has_playground and asked

    @property
    def has_replicas(self) -> bool:
        """Whether engines are of replicas, and come and go with them."""
        return self.replicas > 1 or self.max_replicas is not None

    @property
    def needs_ray(self) -> tuple[str, ...]:
        """The flags of what was asked for that only a Ray cluster has."""
        asked = {
            "--shards": self.shards > 1 and not self.engine_configuration.shards_at_ranks,
            "--sampler-placement ray": self.sampler_placement == "ray" and self.samplers > 0,
            "--replicas": self.replicas > 1,
            "--max-replicas": self.max_replicas is not None,
            "--address": self.address is not None,
            "--reserve": self.reserve,
            "--dashboard": self.dashboard,
        }
        return tuple(flag for flag, wanted in asked.items() if wanted)

    @property
    def on_ray(self) -> bool:
        """Whether the server runs on Ray; else in plain processes of this machine."""
        return self.backend == "ray" or (self.backend == "auto" and bool(self.needs_ray))

    @property
    def engine_configuration(self) -> EngineConfiguration:
        """The options that are the engine's; what is no option keeps the engine's default."""
        settings = self.model_dump(include=set(settings_of(EngineConfiguration)))
        settings["tiers"] = tuple(dict.fromkeys(self.tiers))
        return EngineConfiguration(**settings)


@dataclass(frozen=True, slots=True)
class Option:
    """A field of ``ServeConfig`` as it can be set: by a ``key`` of the file, a ``variable`` of the
    environment or, unless it is ``secret``, a ``flag``. ``group`` is one of ``GROUPS``. ``kind`` is
    the type of its value; None may be among its choices. ``default`` is None where it is
    ``required``, too."""

    key: str
    group: str
    variable: str
    flag: str | None
    metavar: str | None
    description: str
    kind: Any
    default: Any
    required: bool
    secret: bool

    @property
    def repeatable(self) -> bool:
        return get_origin(self.kind) is list

    @property
    def number(self) -> type[int] | type[float] | None:
        """The type of a number; None where the value is none."""
        kinds = (self.kind, *get_args(self.kind))
        return int if int in kinds else float if float in kinds else None


def _options() -> tuple[Option, ...]:
    options: list[Option] = []
    for name, field in ServeConfig.model_fields.items():
        key = field.alias or name
        words: Any = field.json_schema_extra
        flag = words["flag"] or "--" + key.replace("_", "-")
        options.append(
            Option(
                key=key,
                group=words["group"],
                variable=VARIABLE_PREFIX + key.upper(),
                flag=None if words["secret"] else flag,
                metavar=words["metavar"],
                description=field.description or "",
                kind=field.annotation,
                default=None if field.is_required() else field.default,
                required=field.is_required(),
                secret=words["secret"],
            )
        )
    names = list(GROUPS)
    return tuple(sorted(options, key=lambda option: names.index(option.group)))


OPTIONS = _options()


def configuration_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a configuration file, for editors."""
    schema: dict[str, Any] = ServeConfig.model_json_schema(by_alias=True)
    for described in schema["properties"].values():
        for word in ("metavar", "flag", "secret", "group", "title"):
            described.pop(word, None)
    schema["properties"] = {option.key: schema["properties"][option.key] for option in OPTIONS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "lexshard serve",
        "description": "What `lexshard serve --config FILE` reads.",
    }
