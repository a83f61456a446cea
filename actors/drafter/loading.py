"""From a draft model's folder to a model that may draft for the target, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lexshard.actors.body.errors import ModelPathError, ModelRefusedError
from lexshard.actors.body.loading import LoadedModel, load


class TokenizerMismatchError(ModelRefusedError):
    """The draft model's tokens are not the target's."""


def load_draft_model(
    draft: str | Path,
    target: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> LoadedModel:
    """Load the model in the folder ``draft`` to draft for the one in ``target``.

    On the CPU, as `actors.body.loading.load` loads and refuses. Raises TokenizerMismatchError where
    the tokenizers differ. The numbers of output rows may differ: rows are padded.
    """
    check_same_tokens(Path(draft).expanduser(), Path(target).expanduser())
    return load(draft, dtype, device="cpu")


def check_same_tokens(draft: Path, target: Path) -> None:
    """Raise TokenizerMismatchError unless every token has the same id in both model folders."""
    ours, theirs = _tokenizer_file(target), _tokenizer_file(draft)
    if ours == theirs:
        return
    expected, found = _vocabulary(ours, target), _vocabulary(theirs, draft)
    if expected == found:
        return
    differing = {token for token, _ in expected.items() ^ found.items()}
    example = min(differing, key=lambda token: (expected.get(token, found.get(token, 0)), token))
    raise TokenizerMismatchError(
        f"{draft} cannot draft for {target}: {len(differing)} tokens of their tokenizers differ "
        f"({example!r} is {found.get(example)} in one and {expected.get(example)} in the other). "
        "Use a draft model with the target's tokenizer, or draft without a model"
    )


def _tokenizer_file(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if not folder.is_dir():
        raise ModelPathError(f"{folder} is not a folder: give the path of a downloaded model")
    if not file.is_file():
        raise TokenizerMismatchError(
            f"{folder} has no tokenizer.json to compare: save its tokenizer with transformers' "
            "save_pretrained"
        )
    return file.read_bytes()


def _vocabulary(tokenizer: bytes, folder: Path) -> dict[str, int]:
    """Ids by token, added ones too. Raises TokenizerMismatchError where they cannot be read."""
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_buffer(tokenizer).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerMismatchError(
            f"{folder / 'tokenizer.json'} cannot be read ({error}): download the model again"
        ) from error
    return vocabulary
