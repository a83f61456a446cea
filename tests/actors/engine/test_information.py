"""What an engine says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.start.information import files_of


def test_other_files_of_the_same_sizes_have_another_name_and_copies_have_not(
    tmp_path: Path,
) -> None:
    """Where it is an engine's successor that finds them, on another node perhaps."""

    def told(name: str = "model", seed: int = 1, last: str = "a") -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(100_000 * " " + last)
        weights = np.random.default_rng(seed).random(500_000, np.float32)
        save_file({"weight": weights}, folder / "model.safetensors")
        return files_of(EngineConfiguration(str(folder)))

    assert told() == told("copy") == told() != ""
    assert len({told(), told(seed=2), told(last="b")}) == 3
