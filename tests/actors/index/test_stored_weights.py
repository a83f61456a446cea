"""Whether an index belongs to a model is told from files as it is by the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from lexshard.actors.body.errors import WeightsError
from lexshard.actors.body.head_weights import read_head
from lexshard.actors.index.container import write
from lexshard.actors.index.errors import IndexFileError, IndexMismatchError
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.stored_weights import check_index_of
from tests.support.tiny_models import save_tiny


def index_of(folder: Path, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """An index of the model in ``folder``, loaded as servers do, that holds nothing else."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    head = read_head(model.float())
    write(path, describe_weights(head.weight, head.bias), {})
    return path


@pytest.mark.parametrize("family", ["qwen3", "phi", "llama"])  # tied, with biases, of its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_of_the_same_weights_is_known(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "model")
    other = save_tiny(family, tmp_path / "other", seed=1)
    path = index_of(folder, tmp_path / "index", dtype)
    check_index_of(path, folder)
    with pytest.raises(IndexMismatchError, match=f"lexshard index build {other}"):
        check_index_of(path, other)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "model")
    path = index_of(folder, tmp_path / "index")
    with pytest.raises(IndexFileError, match="no vocabulary index"):
        check_index_of(tmp_path / "absent", folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsError, match="download the model again"):
        check_index_of(path, folder)
