"""From a model folder to a body and a head that are known to be right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.body.checkpoint import Checkpoint, read_checkpoint, read_model_config
from lexshard.actors.body.errors import ModelRefusedError, UnsupportedModelError, WeightsError
from lexshard.actors.body.families import SEEING
from lexshard.actors.body.fused import FusedBody, plan_of, supports
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.checked import (
    attend_checked,
    compile_checked,
    graphed_body,
    merge_checked,
)
from lexshard.actors.body.gpu.launchers import check_launchers
from lexshard.actors.body.gpu.rounding import precisely
from lexshard.actors.body.head_weights import HeadWeights, check_head, read_head
from lexshard.actors.body.model_code import model_code, without_a_word
from lexshard.actors.body.parallel.checks import check_shared
from lexshard.actors.body.parallel.slices import Slices, slices_of
from lexshard.actors.body.proven import (
    ProvenModel,
    head_name_of,
    read_proven,
    recall_proven,
    remember_proven,
    tied,
)
from lexshard.actors.body.refusals import check_memory, check_stored_types, model_class
from lexshard.actors.body.self_test import (
    TOLERANCES,
    Expected,
    check_attention,
    check_body,
    check_hidden,
    check_windows,
    plain_forward,
    run_alone,
)
from lexshard.actors.machine import physical_memory
from lexshard.actors.stored_tensors import TEXT_NAMES
from lexshard.kernels.linear import Arithmetic

__all__ = ["HeadWeights", "LoadedModel", "ModelRefusedError", "load"]

_NOT_PAGED = "{} does not work with paged attention and packed weights"
# Typical difference of a body that rounds what it multiplies to one of the same weights that does
# not, relative to a typical value. It grows with the layers, and with what the model makes of small
# differences: 0.003 for the demo, 0.036 for random weights in 18 layers. That its weights, layers
# and attention are right is seen to the last digits without rounding; here, whether it rounds at
# all as it should.
ROUNDED = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to serve.

    ``vocabulary_size`` is the tokenizer's: output rows beyond it are padding. ``dtype`` says what
    the weights are rounded to, and what they are multiplied with; all else on the CPU is float32.
    """

    body: Body
    head: HeadWeights
    dtype: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int]
    max_positions: int
    parameters: int


def load(
    path: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    *,
    body: Literal["auto", "general", "fused"] = "auto",
    batch_invariant: bool = False,
    compiled: bool = False,
    attention: Literal["auto", "triton"] = "triton",
    device: str = "auto",
    memory_bytes: int | None = None,
) -> LoadedModel:
    """Load a local safetensors model and prove it against its own plain forward pass.

    ``dtype`` "auto" keeps what is stored; on a CPU float16 becomes float32, on CUDA it stays, and
    bfloat16 is what becomes of weights of which some are stored so. ``body`` "auto" takes the
    fused body where it supports the model, on a CPU. ``device`` "auto" is CUDA where there is one.
    ``batch_invariant`` computes a GPU's steps in one fixed shape; a CPU's result never depends on
    theirs. ``compiled`` has a GPU compute compiled layers where they compile and are right, and
    ``attention`` "auto" has it attend by FlashInfer where that is installed and right, "triton" by
    our kernels; the body says in words what came of it. ``memory_bytes`` bounds the weights; None
    is all memory of the device.

    Raises a ``ModelRefusedError`` that says what to do: `ModelPathError`, `WeightsError`,
    `UnsupportedModelError`, `BuildToolsError`, `InsufficientMemoryError` or `SelfTestError`.
    """
    available = memory_bytes if memory_bytes is not None else memory_of(choose_device(device))
    options = (dtype, body)
    provable = body != "general" and choose_device(device).type == "cpu"
    proven = recall_proven(Path(path).expanduser(), *options) if provable else None
    if proven is not None:
        return _load_proven(Path(path).expanduser(), proven, available)
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    kind = model_class(config)
    check_stored_types(checkpoint.stored_dtypes)
    place = choose_device(device)
    fused = _choose_fused(body, place, config)
    weights_dtype = dtype_of_weights(dtype, checkpoint.stored_dtypes, place)
    needed = _needed_bytes(checkpoint.parameters, fused, weights_dtype, place)
    check_memory(needed, available)
    model = read_model(kind, checkpoint, weights_dtype, place)
    head = read_head(model)
    with model_code(f"the forward pass of {kind.__name__} does not work on text alone"):
        expected = plain_forward(model)
    exact = TOLERANCES[torch.float32 if place.type == "cpu" else weights_dtype]
    for hidden, logits in zip(expected.hidden, expected.logits, strict=True):
        check_head(head, hidden, logits, exact)
    arithmetic: Arithmetic = "bfloat16" if weights_dtype == torch.bfloat16 else "float32"
    tolerance = TOLERANCES[weights_dtype]
    if place.type == "cuda" and weights_dtype != torch.float32:
        expected, tolerance = precisely(model, expected, tolerance)
        exact = tolerance
    chosen: Body
    if fused:
        weights = tied(slices_of(model), head, head_name_of(model))
        chosen = checked_fused_body(model, weights, arithmetic, expected, exact)
    else:
        chosen = _general_body(model, arithmetic, expected, exact)
    if isinstance(chosen, GeneralBody) and place.type == "cuda":
        merge_checked(chosen, expected, tolerance)
        # The library's order of additions is of the whole step.
        if attention == "auto" and not batch_invariant:
            attend_checked(chosen, expected, tolerance)
        if compiled:
            compile_checked(chosen, expected, tolerance)
        chosen = graphed_body(chosen, expected, tolerance, batch_invariant)
    rows = head.weight.shape[0]
    loaded = LoadedModel(
        body=chosen,
        head=head,
        dtype=str(weights_dtype).removeprefix("torch."),
        vocabulary_size=min(rows, checkpoint.tokenizer_size or rows),
        eos_token_ids=checkpoint.eos_below(rows),
        default_sampling=checkpoint.default_sampling,
        max_positions=chosen.max_positions,
        parameters=checkpoint.parameters,
    )
    if provable and fused and (head_name := head_name_of(model)) is not None:
        found = ProvenModel(
            plan=plan_of(model, arithmetic),
            batch_invariant=chosen.batch_invariant,
            head_name=head_name,
            head_scale=head.scale,
            softcap=head.softcap,
            dtype=loaded.dtype,
            vocabulary_size=loaded.vocabulary_size,
            eos_token_ids=loaded.eos_token_ids,
            default_sampling=loaded.default_sampling,
            parameters=loaded.parameters,
        )
        remember_proven(checkpoint.folder, found, model, *options)
    return loaded


def _load_proven(folder: Path, proven: ProvenModel, available: int) -> LoadedModel:
    check_memory(proven.parameters * getattr(torch, proven.dtype).itemsize, available)
    body, head = read_proven(folder, proven)
    return LoadedModel(
        body=body,
        head=head,
        dtype=proven.dtype,
        vocabulary_size=proven.vocabulary_size,
        eos_token_ids=proven.eos_token_ids,
        default_sampling=proven.default_sampling,
        max_positions=body.max_positions,
        parameters=proven.parameters,
    )


def check_before_weights(
    folder: str | Path,
    stored_bytes: int,
    parameters: Mapping[str, int],
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    body: Literal["auto", "general", "fused"] = "auto",
    device: str = "auto",
    tensor_parallel: int | None = None,
    spread: bool = False,
) -> None:
    """What `load` would refuse before it reads a weight, of a ``folder`` with no more in it than
    ``config.json``.

    ``stored_bytes`` is the size of the weights' files, and ``parameters`` how many numbers they
    hold by safetensors' types, empty where that is not known: then the type is taken from
    ``config.json``, and what that leaves open is for `load` to refuse. With ``tensor_parallel`` it
    is `actors.body.parallel.loading.load_parallel` that would, by ranks of which each has a GPU of
    its own or, where they are ``spread``, perhaps a machine.

    Raises a ``ModelRefusedError``, as `load` does.
    """
    config = read_model_config(Path(folder))
    kind = model_class(config)
    if tensor_parallel is not None:
        check_shared(config.to_dict(), tensor_parallel)
        check_layers_shared(config)
    if not parameters:
        written = getattr(config, "dtype", None) or torch.float32
        name = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(written, "F32")
        parameters = {name: stored_bytes // (4 if name == "F32" else 2)}
    check_stored_types(frozenset(parameters))
    count = sum(parameters.values())
    if config.model_type in SEEING.values():  # what a model sees with is not loaded
        with model_code(f"transformers cannot make a {kind.__name__}"), torch.device("meta"):
            count = min(count, sum(each.numel() for each in kind(config).parameters()))
    place = choose_device(device)
    weights_dtype = dtype_of_weights(dtype, frozenset(parameters), place)
    if tensor_parallel is None:
        fused = _choose_fused(body, place, config)
        needed = _needed_bytes(count, fused, weights_dtype, place)
    else:
        apart = tensor_parallel if spread or place.type != "cpu" else 1
        needed = count * weights_dtype.itemsize // apart
    check_memory(needed, memory_of(place))


def check_layers_shared(config: Any) -> None:
    """Raises UnsupportedModelError for layers that ranks do not compute."""
    if not supports(config):
        raise UnsupportedModelError(
            f"this {config.model_type} has layers that --tensor-parallel does not share: leave it "
            "out"
        )


def _needed_bytes(parameters: int, fused: bool, dtype: torch.dtype, place: torch.device) -> int:
    if place.type != "cpu":
        return parameters * dtype.itemsize
    # float32 weights, and for a moment what is kept of them.
    return parameters * (4 + (dtype.itemsize if fused else 0))


def choose_device(wanted: str) -> torch.device:
    """The first GPU where ``wanted`` is "auto" and there is one."""
    available = torch.cuda.is_available()
    if wanted.startswith("cuda") and not available:
        raise UnsupportedModelError("there is no CUDA device here: use --device cpu")
    chosen = torch.device(wanted if wanted != "auto" else "cuda" if available else "cpu")
    if chosen.type == "cuda":
        check_launchers()
    return chosen


def _choose_fused(wanted: str, place: torch.device, config: Any) -> bool:
    if wanted == "general":
        return False
    possible = place.type == "cpu" and supports(config)
    if wanted == "fused" and not possible:
        raise UnsupportedModelError(
            f"the fused body cannot be used, it does not support this {config.model_type} on "
            f"{place.type}: use body=general"
        )
    return possible


def dtype_of_weights(wanted: str, stored: frozenset[str], place: torch.device) -> torch.dtype:
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if place.type == "cpu":
        # A few float32 weights among bfloat16 ones: the CPU keeps both as they are.
        return torch.bfloat16 if "BF16" in stored and "F32" not in stored else torch.float32
    if "BF16" in stored:
        return torch.bfloat16
    # As it is stored: bfloat16 would round away three bits of every weight.
    return torch.float16 if "F16" in stored else torch.float32


def memory_of(place: torch.device) -> int:
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    return physical_memory()


def read_model(kind: Any, checkpoint: Checkpoint, dtype: torch.dtype, place: torch.device) -> Any:
    """The transformers model with eager attention: the reference of the self-test."""
    config = checkpoint.config
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.text_config  # of a model that also sees or hears: served as a text model
    names = {f"^{re.escape(stored)}": text for stored, text in TEXT_NAMES.items()}
    told = without_a_word() if checkpoint.text_alone else nullcontext()
    with model_code(f"transformers cannot make a {kind.__name__} of {checkpoint.folder}"), told:
        model, report = kind.from_pretrained(
            checkpoint.folder,
            config=config,
            key_mapping=names if checkpoint.text_alone else None,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **_placement(place),
        )
    missing = sorted(report["missing_keys"])
    if missing:
        remedy = "download the model again"
        if config is not checkpoint.config:
            remedy += ", or serve a checkpoint of the text model alone"
        raise WeightsError(
            f"{checkpoint.folder} lacks {len(missing)} weights of {kind.__name__} "
            f"({', '.join(missing[:3])}, ...): {remedy}"
        )
    if model.base_model is model:
        raise UnsupportedModelError(
            f"{kind.__name__} names no part of it that computes hidden states: choose another model"
        )
    model = model.eval().requires_grad_(False)
    return model.float() if place.type == "cpu" else model.to(place)


def _placement(place: torch.device) -> dict[str, Any]:
    """How transformers is told where weights go: each straight to its device, so that the host
    never holds the model. Without accelerate, which that takes, they pass through the host."""
    if place.type == "cpu" or find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": place}}


def _general_body(
    model: Any, arithmetic: Arithmetic, expected: Expected, exact: float
) -> GeneralBody:
    """The general body, checked before it rounds anything and once more when it does."""
    ids, plain = expected.token_ids, expected.hidden
    rounds = arithmetic == "bfloat16" and model.device.type == "cpu"
    with model_code(_NOT_PAGED.format(type(model).__name__)):
        body = GeneralBody(model, pack_linears=not rounds)
        invariant = check_body(body, ids, plain, "the plain forward pass", exact)
        if rounds:
            body.round_products()
            invariant = check_body(
                body, ids, plain, "the plain forward pass", ROUNDED, typical=True
            )
    check_windows(body.settings, model.config.get_text_config(decoder=True))
    body.batch_invariant = invariant and body.device.type == "cpu"
    return body


def checked_fused_body(
    model: Any,
    weights: Slices,
    arithmetic: Arithmetic,
    expected: Expected,
    exact: float,
) -> Body:
    """The fused body of the model's ``weights``, checked against the general one of the same, which
    rounds nothing; where it rounds, what it computes with is checked without that, too."""
    plan = plan_of(model, arithmetic)
    fused = FusedBody.from_slices(plan, weights)
    general = GeneralBody(model, pack_linears=False)
    check_body(general, expected.token_ids, expected.hidden, "the plain forward pass", exact)
    check_windows(general.settings, model.config.get_text_config(decoder=True))
    ours = run_alone(general, expected.token_ids)
    rounds = arithmetic == "bfloat16"
    if rounds:
        unrounded = [fused.unrounded(tokens) for tokens in expected.token_ids]
        check_hidden(unrounded, ours, "the fused body, without rounding", "the general body", exact)
    tolerance = ROUNDED if rounds else exact
    fused.batch_invariant = check_body(
        fused, expected.token_ids, ours, "the general body", tolerance, typical=rounds
    )
    check_attention(plan.attention(), general.settings)
    return fused
