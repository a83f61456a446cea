"""What can be known to be wrong with a configuration, or with the limit of open files, before
anything is started."""

from __future__ import annotations

import importlib
import os
import re
import resource
import socket
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lexshard.actors.body.errors import UnsupportedModelError, WeightsError
from lexshard.actors.body.parallel.checks import check_folder_shared, check_ranks
from lexshard.actors.configuration import DEFAULT_TIERS, GPU_TIER, NGRAM, check_utilization
from lexshard.actors.drafter.checks import check_drafting
from lexshard.actors.head.sharded.checks import check_shards
from lexshard.cluster.config import OPTIONS, ServeConfig
from lexshard.cluster.config_sources import OWN_KEY, refuse_readable
from lexshard.cluster.ingress import (
    FILES_OF_A_CONNECTION,
    MOST_CONNECTIONS,
    OTHER_FILES,
    connections_that_fit,
)
from lexshard.cluster.models.files import is_whole
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.names import ModelNameError
from lexshard.cluster.models.progress import Announce
from lexshard.serve_app.start.readiness import StartupError

TOKENIZER = "tokenizer.json"
LONGEST_FOLDER = 71  # HAProxy takes sockets of 97 bytes, /lexshard-XXXXXXXX/metrics among them
FLAGS = {option.key: option.flag for option in OPTIONS}


def ready_to_start(config: ServeConfig, announce: Announce, *, weights: bool = True) -> ServeConfig:
    """``config`` with the folders of its models, which are fetched where they are named; looks at
    everything else first, and then into the folders.

    Without ``weights`` none are fetched, and an index is not compared with those that are not
    there.

    Raises:
        StartupError: with one line that says what to do.
    """
    config = config.with_absolute_paths()
    check_settings(config)
    check_listening(config)
    check_temporary_folder()
    try:
        found = with_model_folders(config, announce, weights=weights)
    except ModelNameError as error:
        raise StartupError(str(error)) from error
    lacking = found.model != config.model and not is_whole(Path(found.model))
    check_files(found.model_copy(update={"index": None}) if lacking else found)
    return found


def check_listening(config: ServeConfig) -> None:
    """Raises StartupError where another program has the port."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except (OSError, TypeError, ValueError) as error:  # or no name of a host at all
        why = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"cannot listen on {config.host!r} port {config.port}: {why}; choose another --port or "
            "--host"
        ) from error


def check_temporary_folder() -> None:
    """Raises StartupError where sockets cannot be, or not in what HAProxy reads."""
    remedy = "set TMPDIR to a short path, without blanks, quotes, # and \\, that can be written"
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise StartupError(f"{error.strerror}: {remedy}") from error
    if len(os.fsencode(folder)) > LONGEST_FOLDER or re.search(r"[\s#\"'\\]", folder):
        raise StartupError(f"no sockets can be in the temporary folder {folder}: {remedy}")


def check_settings(config: ServeConfig) -> None:
    """Looks at what needs no model.

    Raises:
        StartupError: with one line that says what to do.
    """
    if config.lets_page_kill and not (config.on_loopback or config.api_keys):
        raise StartupError(
            "--playground-kills beyond loopback would let anybody end the engine: set API keys, "
            "which it then asks for"
        )
    if os.environ.get(OWN_KEY) and not (config.on_loopback or config.api_keys):
        told = "is what clients ask with, and this server would be open to all: set"
        raise StartupError(f"{OWN_KEY} {told} LEXSHARD_API_KEYS for it, or unset {OWN_KEY}")
    try:
        check_drafting(config.engine_configuration)
        check_shards(config.engine_configuration)
        check_ranks(config.engine_configuration)
        check_utilization(config.gpu_memory_utilization)
    except ValueError as error:
        raise StartupError(str(error)) from error
    if config.hot_vocabulary is not None and not Path(config.hot_vocabulary).is_file():
        raise StartupError(
            f"no hot vocabulary at {config.hot_vocabulary}: make one with `lexshard hotset build`"
        )
    check_effects(config)
    check_scoring(config)
    check_backend(config)
    check_certificate(config)
    check_receipt_key(config)
    check_replicas(config)
    if config.otlp_traces_endpoint is not None:
        check_tracing()


def check_files(config: ServeConfig) -> None:
    """Looks into the folders of the models of ``config``, none of whose weights are loaded.

    Raises:
        StartupError: with one line that says what to do.
    """
    model = check_model_folder(config.model)
    if config.tensor_parallel is not None:
        try:
            check_folder_shared(model, config.tensor_parallel)
        except UnsupportedModelError as error:
            raise StartupError(str(error)) from error
    if config.draft is not None and config.draft != NGRAM:
        _check_draft(check_model_folder(config.draft), model)
    if config.index is not None and Path(config.index).is_dir():
        raise StartupError(f"--index {config.index} is a folder: name the file in it")
    if config.index is not None and config.head != "dense" and Path(config.index).is_file():
        _check_index(Path(config.index), model, config)
    if config.score_template is not None:
        _check_score_labels(model, config)


def check_effects(config: ServeConfig) -> None:
    """Raises StartupError where an option is not at its default and would do nothing."""
    reserves = config.reserve or config.address is not None or config.has_replicas
    page = config.has_playground or not config.playground_kills
    shares = [key for key in FLAGS if key.startswith(("cpus_per_", "gpus_per_"))]
    of_samplers = ["sampler_placement", "sampler_threads"]
    of_a_gpu = ["attention", "no_compile", "gpu_memory_utilization"]
    screens, clusters = config.head != "dense", config.shard_assignment.startswith("clusters")
    several = config.shards > 1 or (config.tensor_parallel or 1) > 1
    on_a_cpu = config.device != "cuda" and config.shards == 1
    guesses = config.draft or config.edge_sessions
    for keys, works, what in (
        (["target_ongoing_requests"], config.max_replicas, "adds replicas: give --max-replicas"),
        (["routing"], config.has_replicas, "chooses among replicas: give --replicas 2 or more"),
        (shares, reserves, "is for what Ray reserves, which is nothing: give --reserve, too"),
        (["placement_seconds"], config.address, "is for a cluster that is joined: give --address"),
        (["shard_assignment", "shard_trace"], config.shards > 1, "is for shards: give --shards 2"),
        (["shard_seconds"], several, "is for shards and ranks: give --shards or --tensor-parallel"),
        (of_samplers, config.samplers, "is for samplers: give --samplers 1 or more"),
        (["tiers"], screens, "screens, and --head dense does not: leave one out"),
        (["index"], screens or clusters, "is of no use to --head dense: leave one out"),
        (["draft_tokens", "draft_length"], config.draft, "is about guesses: give --draft, too"),
        (["verify"], guesses, "is about guesses: give --draft, or --edge-sessions"),
        (["edge_resume_seconds"], config.edge_sessions, "is for devices: give --edge-sessions"),
        (["playground_kills"], page, "needs the page: give --playground, too"),
        (of_a_gpu, config.device != "cpu", "is for a GPU: leave it out"),
        (["steps_at_once"], on_a_cpu, "is for a CPU without shards: leave it out"),
    ):
        for key in () if works else keys:
            if getattr(config, key) != ServeConfig.model_fields[key].default:
                raise StartupError(f"{FLAGS[key]} {what}")


def check_scoring(config: ServeConfig) -> None:
    """Raises StartupError where labels and template do not say how pairs are scored."""
    if config.score_labels or config.score_template is not None:
        from lexshard.serve_app.scoring.template import check_scoring_options  # is seldom needed

        try:
            check_scoring_options(config)
        except ValueError as error:
            raise StartupError(str(error)) from error


def check_backend(config: ServeConfig) -> None:
    """Raises StartupError for plain processes where something needs Ray, and for the dashboard of a
    cluster that others run."""
    if config.dashboard and config.address is not None:
        raise StartupError(
            "--dashboard is for a Ray of the server's own: leave it out, or --address"
        )
    if config.backend == "process" and config.needs_ray:
        raise StartupError(
            f"{config.needs_ray[0]} needs Ray: leave --backend process out, or take --backend ray"
        )


def check_replicas(config: ServeConfig) -> None:
    """Raises StartupError for replicas that cannot be or that others have to start."""
    most = config.replicas if config.max_replicas is None else config.max_replicas
    if most < config.replicas:
        raise StartupError(
            f"--max-replicas {most} are fewer than --replicas {config.replicas}: give more of them"
        )
    if not config.has_replicas:
        return
    if config.api_processes > 1:
        raise StartupError("replicas are API processes, too: leave out --api-processes")
    if config.pin_threads:
        raise StartupError(
            "--pin-threads would pin every replica of a machine to the same cores: leave it out"
        )
    if config.address is not None:
        raise StartupError(
            "replicas in a cluster that is joined are Ray Serve's to start: use `serve deploy` "
            "with lexshard.serve_app.build:app"
        )


def check_certificate(config: ServeConfig) -> None:
    """Raises StartupError where certificate and key are none, or none of each other."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise StartupError("--ssl-keyfile needs the certificate: give --ssl-certfile, too")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=""
        )
    except (OSError, ValueError) as error:
        raise StartupError(
            f"no use of the certificate {config.ssl_certfile}: {error}; both files are PEM, the "
            "key without a password"
        ) from error


def check_receipt_key(config: ServeConfig) -> None:
    """Raises StartupError where the key that is to sign receipts is none, or others' to read."""
    if config.receipt_key is None:
        return
    from lexshard.actors.receipts.signature import Signer

    try:
        Signer.read(config.receipt_key)
        refuse_readable(Path(config.receipt_key).expanduser())
    except (OSError, ValueError) as error:
        raise StartupError(f"--receipt-key: {error}") from error
    except ImportError as error:
        raise StartupError(
            f"--receipt-key needs a package ({error}): pip install cryptography"
        ) from error


def certificate_with_key(config: ServeConfig) -> bytes | None:
    """What HAProxy reads from one file; None without HTTPS.

    Raises:
        OSError: a file cannot be read.
    """
    files = [file for file in (config.ssl_certfile, config.ssl_keyfile) if file is not None]
    return b"\n".join(Path(file).read_bytes() for file in files) if files else None


def check_tracing() -> None:
    """Raises StartupError where what sends spans is not installed."""
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise StartupError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install '.[tracing]' in a "
            "checkout"
        ) from error


def check_model_folder(folder: str) -> Path:
    """The folder as a path. Raises StartupError where it is none of a model."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise StartupError(
            f"no model folder at {folder}: give one that is on this machine, or a name on the "
            "Hugging Face Hub (ORG/NAME)"
        )
    for name in ("config.json", TOKENIZER):
        if not (path / name).is_file():
            raise StartupError(
                f"{folder} is no model folder: it has no {name}; download the model again, or "
                "save it with save_pretrained"
            )
    return path


def _check_index(path: Path, model: Path, config: ServeConfig) -> None:
    # numpy, which nothing else that is checked here needs, stays as long as the server runs.
    from lexshard.actors.index.container import CLUSTERS, check_tiers
    from lexshard.actors.index.errors import IndexFileError
    from lexshard.actors.index.stored_weights import check_index_of

    try:
        header = check_index_of(path, model)
        if config.head != "paper":
            # Whether there is a GPU is not known yet: all that one needs may be enough.
            enough = GPU_TIER in header.tiers
            check_tiers(path, header, config.tiers or (() if enough else DEFAULT_TIERS))
    except (IndexFileError, WeightsError) as error:
        raise StartupError(str(error)) from error
    if config.head == "paper" and CLUSTERS not in header.parts:
        raise StartupError(
            f"{path} has no clusters, which the paper's head needs: build it again with "
            f"`lexshard index build {config.model} --out {path}`"
        )


def _check_score_labels(model: Path, config: ServeConfig) -> None:
    """With the tokenizer of the API processes: a second, and what it takes to load transformers."""
    from lexshard.serve_app.openai.tokenization import ModelTokenizer
    from lexshard.serve_app.scoring.template import label_ids

    try:
        label_ids(config.score_labels, ModelTokenizer.load(model))
    except ValueError as error:
        raise StartupError(str(error)) from error


def _check_draft(draft: Path, model: Path) -> None:
    if (draft / TOKENIZER).read_bytes() == (model / TOKENIZER).read_bytes():
        return
    # Seconds, which nearly no pair needs.
    from lexshard.actors.body.errors import ModelRefusedError
    from lexshard.actors.drafter.loading import check_same_tokens

    try:
        check_same_tokens(draft, model)
    except ModelRefusedError as error:
        raise StartupError(str(error)) from error


# With fewer the processes themselves do not start: libraries, sockets, shared memory.
LEAST_FILES, LEAST_FILES_ON_RAY = 256, 512


def make_room(on_ray: bool, tell: Callable[[str], None]) -> None:
    """Raises what this process and those it starts may have open as far as it goes, and tells where
    that is not enough for `MOST_CONNECTIONS`.

    Raises:
        StartupError: it is not enough to start with.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = max(allowed, FILES_OF_A_CONNECTION * MOST_CONNECTIONS + OTHER_FILES)
    least = LEAST_FILES_ON_RAY if on_ray else LEAST_FILES
    remedy = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)"
    if most < least:
        raise StartupError(f"a process may open {most} files here, {least} are needed: {remedy}")
    wanted = min(most, FILES_OF_A_CONNECTION * MOST_CONNECTIONS + OTHER_FILES)
    if allowed < wanted:
        with suppress(ValueError, OSError):  # another system's own bounds: it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    connections = connections_that_fit()
    if connections < MOST_CONNECTIONS:
        tell(
            f"a process may open {most:,} files here: at most {connections:,} connections at once "
            f"instead of {MOST_CONNECTIONS:,}; for more {remedy}"
        )
