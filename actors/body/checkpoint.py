"""What a model folder says about itself before any weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lexshard.actors.body.errors import ModelPathError, UnsupportedModelError, WeightsError
from lexshard.actors.body.families import SEEING
from lexshard.actors.body.model_code import model_code
from lexshard.actors.stored_tensors import stored_tensors

# Of models that also see: what they see with.
_UNREAD = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A local model folder: configuration, size, where sequences end, how it likes to be sampled.

    ``tokenizer_size`` is one more than the highest token id, None without a tokenizer: output rows
    beyond it are padding. ``stored_dtypes`` are safetensors names (F32, BF16, F16, ...).
    ``text_alone`` is of a model that also sees, of which ``config`` and ``parameters`` are its
    text's.
    """

    folder: Path
    config: Any
    parameters: int
    stored_dtypes: frozenset[str]
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int]
    tokenizer_size: int | None
    text_alone: bool = False

    def eos_below(self, rows: int) -> tuple[int, ...]:
        """Where sequences end, of what a head of so many rows draws: grammars take no other."""
        size = min(rows, self.tokenizer_size or rows)
        return tuple(token for token in self.eos_token_ids if 0 <= token < size)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Look into a model folder; nothing is downloaded and no code from it is run.

    Raises ModelPathError, WeightsError or UnsupportedModelError.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelPathError(f"{folder} is not a folder: give the path of a downloaded model")
    if not (folder / "config.json").is_file():
        raise ModelPathError(f"{folder} has no config.json: give the folder of a saved model")
    tensors = stored_tensors(folder)
    description = _read_json(folder / "config.json")
    config = read_model_config(folder)
    text_alone = description.get("model_type") in SEEING
    unread = _UNREAD if text_alone else ()
    tokenizer_size, tokenizer_eos = _read_tokenizer(folder)
    generation = _read_json(folder / "generation_config.json")
    return Checkpoint(
        folder=folder,
        config=config,
        parameters=sum(tensor.size for tensor in tensors if not tensor.name.startswith(unread)),
        stored_dtypes=frozenset(tensor.dtype for tensor in tensors),
        eos_token_ids=_ids(
            generation.get("eos_token_id"), description.get("eos_token_id"), tokenizer_eos
        ),
        default_sampling={
            key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None
        },
        tokenizer_size=tokenizer_size,
        text_alone=text_alone,
    )


def read_model_config(folder: Path) -> Any:
    """What transformers makes of the ``config.json`` in ``folder``, which need hold nothing else.
    Of a model that also sees and whose text is known (`families.SEEING`), what it makes of that.

    Raises WeightsError or UnsupportedModelError.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    description = _read_json(folder / "config.json")
    if description.get("model_type") not in CONFIG_MAPPING and "auto_map" in description:
        raise UnsupportedModelError(
            f"{folder} needs Python code of its own, which is never run: use a model that "
            "transformers knows"
        )
    with model_code(f"transformers cannot read {folder / 'config.json'}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.text_config if config.model_type in SEEING else config


def positions_of(config: Any) -> int:
    """How many positions the model of a transformers ``config`` knows. YaRN's scaling lengthens the
    context that it was trained with; its angles are the same at every length."""
    most: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    if rope.get("rope_type") != "yarn":
        return most
    return max(most, int(rope["original_max_position_embeddings"] * (rope.get("factor") or 1)))


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises WeightsError where it is not a JSON object."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON ({error}): download the model again") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{file} holds no JSON object: download the model again")
    return found


def _ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Distinct ids of all sources, in order."""
    listed = (source if isinstance(source, list) else [source] for source in sources)
    found = [token for tokens in listed for token in tokens if token is not None]
    for token in found:
        if not isinstance(token, int):
            raise WeightsError(
                f"eos_token_id is {token!r}, which is no id: correct config.json or "
                "generation_config.json"
            )
    return tuple(dict.fromkeys(found))


def _read_tokenizer(folder: Path) -> tuple[int | None, int | None]:
    """One more than the highest token id, and the id that ends a sequence.

    Raises ModelCodeError.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, None
    from transformers import AutoTokenizer

    with model_code(f"the tokenizer in {folder} cannot be read", "download the model again"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return max(tokenizer.get_vocab().values()) + 1, tokenizer.eos_token_id
