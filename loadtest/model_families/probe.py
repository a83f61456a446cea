"""One family: write a tiny random model, serve it, compare with transformers' own forward pass."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from lexshard.actors.body.batch import Body
from lexshard.actors.body.errors import ModelCodeError, ModelRefusedError, WeightsError
from lexshard.actors.body.loading import load
from lexshard.actors.body.self_test import Piece, pack_batch
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import SamplingParameters
from lexshard.loadtest.model_families.shrink import LAST_TOKEN, tiny_configuration

Verdict = Literal["invariant", "served", "refused", "untested", "wrong", "broken"]

LENGTHS = (61, 40)  # beyond every window, and beyond what the self-test at load looks at
GENERATED = 4
TOLERANCE = 1e-4  # the loader's
_TABLES = ((5, 2, 7, 0), (3, 6, 1, 4))
# Chunks beside prompts, then single tokens of both together; and every sequence alone.
_MIXED: tuple[tuple[Piece, ...], ...] = (
    ((0, 0, 17), (1, 0, 5)),
    ((0, 17, 18), (1, 5, 38)),
    ((0, 18, 59),),
    ((0, 59, 60), (1, 38, 39)),
    ((0, 60, 61), (1, 39, 40)),
)
_ALONE: tuple[tuple[Piece, ...], ...] = (((0, 0, 61),), ((1, 0, 40),))


@dataclass(frozen=True, slots=True)
class FamilyOutcome:
    """What became of a family.

    ``invariant`` and ``served`` gave transformers' hidden states and tokens (``served``: not the
    same bits in every batch); ``refused`` says why; ``untested``: transformers makes no such model
    here. ``wrong`` (served and not equal) and ``broken`` (something else was raised) are bugs.
    """

    family: str
    verdict: Verdict
    reason: str = ""


def probe(family: str, folder: Path) -> FamilyOutcome:
    """Try the family with a model of its own in ``folder``."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        configuration = tiny_configuration(family)
    except Exception as error:  # settings that must agree and were made small one by one
        return FamilyOutcome(family, "untested", f"no tiny configuration: {error}")
    try:
        _write(configuration, family, folder)
    except Exception as error:  # packages that are missing, parts that are made elsewhere
        return _unwritten(configuration, family, folder, f"{type(error).__name__}: {error}")
    settings = EngineConfiguration(
        str(folder), dtype="float32", device="cpu", threads=1, head="dense", max_running=2
    )
    try:
        engine = Engine(settings)
    except ModelRefusedError as refusal:
        if _raised_here(refusal.__cause__):
            return FamilyOutcome(family, "broken", traceback.format_exc())
        return FamilyOutcome(family, "refused", str(refusal).replace(str(folder), "the folder"))
    except Exception:
        return FamilyOutcome(family, "broken", traceback.format_exc())
    difference = _compare(engine, folder)
    if difference:
        return FamilyOutcome(family, "wrong", difference)
    return FamilyOutcome(family, "invariant" if engine.model.body.batch_invariant else "served")


def _raised_here(error: BaseException | None) -> bool:
    """Whether it comes from code of ours, not from transformers or what it calls: a bug, which the
    loader cannot tell from a family that needs something else."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return bool(frames) and "site-packages" not in frames[-1].filename


def _unwritten(configuration: Any, family: str, folder: Path, reason: str) -> FamilyOutcome:
    """A model that transformers cannot make here may still be refused by what it says of itself."""
    configuration.save_pretrained(folder)
    _name(family, folder)
    save_file({}, folder / "model.safetensors")
    try:
        load(folder, "float32", device="cpu")
    except (WeightsError, ModelCodeError):
        return FamilyOutcome(family, "untested", reason)
    except ModelRefusedError as refusal:
        return FamilyOutcome(family, "refused", str(refusal).replace(str(folder), "the folder"))
    return FamilyOutcome(family, "broken", f"served without weights, after {reason}")


def _write(configuration: Any, family: str, folder: Path) -> None:
    """Save a random model of the family, in the form in which its checkpoints are."""
    torch.manual_seed(0)
    model = _class_of(configuration)(configuration)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms of a fresh model are 0 and 1
            scale, offset = (0.25, 0.0) if parameter.ndim > 1 else (0.3, 0.5)
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
    model.save_pretrained(folder)
    _name(family, folder)


def _name(family: str, folder: Path) -> None:
    """Some families share the configuration class of another: say which one it is."""
    description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    description["model_type"] = family
    (folder / "config.json").write_text(json.dumps(description), encoding="utf-8")


def _class_of(configuration: Any) -> Any:
    """The class of the family's checkpoints: not of the text model alone where there is more."""
    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration)]
    if found.config_class is not type(configuration):
        for mapping in (
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
            modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING,
        ):
            if type(configuration) in mapping:
                return mapping[type(configuration)]
    return found


def _compare(engine: Engine, folder: Path) -> str:
    """What differs from transformers; empty where nothing does."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [
        [(17 * sequence + 7 * place + 3) % (LAST_TOKEN - 1) for place in range(length)]
        for sequence, length in enumerate(LENGTHS)
    ]
    parameters = SamplingParameters(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    tokens = [list(done.token_ids) for done in engine.generate(prompts, parameters)]
    body = engine.model.body
    mixed, alone = _run(body, prompts, _MIXED), _run(body, prompts, _ALONE)
    with torch.inference_mode():
        hidden = torch.cat(
            [
                plain.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
                for prompt in prompts
            ]
        )
        expected = [_continuation(plain, prompt) for prompt in prompts]
    for name, ours in (("mixed batches", mixed), ("one piece", alone)):
        difference = float((ours - hidden).abs().max() / hidden.abs().max())
        if not difference <= TOLERANCE:
            return f"hidden states in {name} differ by {difference:.2g} of the largest"
    if tokens != expected:
        return f"tokens {tokens} where transformers has {expected}"
    if body.batch_invariant and not torch.equal(mixed, alone):
        return "bits depend on the batch"
    return ""


def _run(
    body: Body, prompts: list[list[int]], steps: tuple[tuple[Piece, ...], ...]
) -> torch.Tensor:
    """Hidden states of all prompts, one after the other, computed in the given steps."""
    body.allocate_cache(8)
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in range(len(prompts))}
    for pieces in steps:
        hidden = body.forward(pack_batch(prompts, pieces, _TABLES))
        lengths = [stop - start for _, start, stop in pieces]
        for (sequence, _, _), rows in zip(pieces, hidden.split(lengths), strict=True):
            found[sequence].append(rows)
    return torch.cat([torch.cat(parts) for parts in found.values()])


def _continuation(plain: Any, prompt: list[int]) -> list[int]:
    """The likeliest tokens, one by one, without a cache."""
    tokens = list(prompt)
    for _ in range(GENERATED):
        logits = plain(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
