"""A load whose checks passed need not repeat them: the same model, read straight from its files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lexshard.actors.body import loading, proven
from lexshard.actors.body.errors import InsufficientMemoryError, SelfTestError
from lexshard.actors.body.families import FAMILIES
from lexshard.actors.body.fused import FusedBody
from lexshard.actors.body.loading import LoadedModel, load
from lexshard.kernels.compile_cache import compiled_folder
from tests.support.paths import DEMO_DRAFT
from tests.support.tiny_models import save_tiny

WEIGHTS = "model.safetensors"
Watch = Callable[[], int]


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lexshard.actors.remembered.home_folder", lambda: tmp_path / "home")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """How many loads have compared their body with the plain forward pass."""
    made: list[Any] = []
    plain = loading.plain_forward
    monkeypatch.setattr(
        loading, "plain_forward", lambda model: (made.append(model), plain(model))[1]
    )
    return lambda: len(made)


def save_fusable(folder: Path, family: str = "llama", **changes: Any) -> Path:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen2": {"max_window_layers": 0},
    }.get(family, {})
    return save_tiny(family, folder, **shape, **changes)


def arrays(body: Any) -> list[np.ndarray[Any, Any]]:
    assert isinstance(body, FusedBody)
    return [*body._weights, body._embedding]


def assert_same(first: LoadedModel, second: LoadedModel) -> None:
    for ours, theirs in zip(arrays(first.body), arrays(second.body), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert torch.equal(first.head.weight, second.head.weight)
    assert first.head.weight.dtype == second.head.weight.dtype
    for name in ("bias", "softcap", "scale"):
        assert getattr(first.head, name) == getattr(second.head, name)
    for name in LoadedModel.__slots__:
        if name not in ("body", "head"):
            assert getattr(first, name) == getattr(second, name), name
    assert first.body._shape == second.body._shape  # type: ignore[attr-defined]
    assert first.body.batch_invariant == second.body.batch_invariant


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_load_gives_the_same_model_without_its_checks(
    family: str, dtype: Any, tmp_path: Path, checks: Watch
) -> None:
    folder = save_fusable(tmp_path / family, family)
    first = load(folder, dtype, device="cpu")
    assert_same(first, load(folder, dtype, device="cpu"))
    assert checks() == 1


def test_an_embedding_that_is_the_head_is_in_memory_once(tmp_path: Path, checks: Watch) -> None:
    """Of a large vocabulary two would be half of all that is served."""
    folder = save_fusable(tmp_path / "tied", "qwen3")
    for _ in range(2):
        model = load(folder, "bfloat16", device="cpu")
        rows = model.head.weight.view(torch.int16).numpy()
        assert np.shares_memory(rows, model.body._embedding)  # type: ignore[attr-defined]
    assert checks() == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_type_is_stored(stored: torch.dtype, tmp_path: Path, checks: Watch) -> None:
    folder = save_fusable(tmp_path / "model")
    weights = {name: each.to(stored) for name, each in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert_same(load(folder, device="cpu"), load(folder, device="cpu"))
    assert checks() == 1


@pytest.mark.slow
def test_a_second_load_needs_no_transformers(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from lexshard.actors.body.loading import load\n"
        f"load({str(DEMO_DRAFT)!r}, device='cpu')\n"
        "print('transformers' in sys.modules)"
    )
    environment = os.environ | {"LEXSHARD_HOME": str(tmp_path)}
    # Kernels that are compiled already are where they are.
    environment["NUMBA_CACHE_DIR"] = str(compiled_folder())
    said = [
        subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).strip()
        for _ in range(2)
    ]
    assert said == ["True", "False"]


@pytest.mark.slow
def test_an_engine_has_its_first_load_proven_by_another_process(tmp_path: Path) -> None:
    """What is imported for that would stay in the engine's memory."""
    program = (
        "import sys\n"
        "from lexshard.actors.configuration import EngineConfiguration\n"
        "from lexshard.cluster.engine.proof import prove_apart\n"
        f"configuration = EngineConfiguration(model={str(DEMO_DRAFT)!r}, device='cpu')\n"
        "with prove_apart(configuration, lambda phase: None):\n"
        "    pass\n"
        "from lexshard.actors.body.loading import load\n"
        "print(load(configuration.model, device='cpu').body.name, 'transformers' in sys.modules)"
    )
    environment = os.environ | {"LEXSHARD_HOME": str(tmp_path)}
    environment["NUMBA_CACHE_DIR"] = str(compiled_folder())
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert said == "fused False\n"


def test_it_is_tried_once_and_where_a_fused_body_can_be_proven(tmp_path: Path) -> None:
    general = save_tiny("gpt2", tmp_path / "general")
    first, second = save_fusable(tmp_path / "first"), save_fusable(tmp_path / "second")
    options = ("auto", "auto")
    assert not proven.is_to_prove(tmp_path / "nothing", *options)
    assert not proven.is_to_prove(general, *options)
    assert proven.is_to_prove(first, *options)
    load(first, device="cpu")
    assert not proven.is_to_prove(first, *options)
    assert proven.is_to_prove(first, "bfloat16", "auto")
    proven.note_tried(second, *options)
    assert not proven.is_to_prove(second, *options)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_files_that_changed_are_checked_anew(name: str, tmp_path: Path, checks: Watch) -> None:
    folder = save_fusable(tmp_path / "model")
    load(folder, device="cpu")
    path = folder / name
    content = path.read_bytes() if path.exists() else b"{}"
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # of the same size, and no newer
    load(folder, device="cpu")
    assert checks() == 2


def test_other_software_another_machine_or_another_option_checks_anew(
    tmp_path: Path, checks: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_fusable(tmp_path / "model")
    load(folder, device="cpu")
    load(folder, "bfloat16", device="cpu")
    assert checks() == 2
    monkeypatch.setattr(proven, "software_and_machine", lambda: "another")
    load(folder, device="cpu")
    assert checks() == 3


def test_the_general_body_is_checked_every_time(tmp_path: Path, checks: Watch) -> None:
    folder = save_fusable(tmp_path / "model")
    for _ in range(2):
        load(folder, device="cpu", body="general")
    assert checks() == 2


def test_checks_that_failed_are_made_again(
    tmp_path: Path, checks: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_fusable(tmp_path / "model")

    def refuse(*_: Any) -> None:
        raise SelfTestError("it differs")

    with monkeypatch.context() as broken:
        broken.setattr(loading, "check_head", refuse)
        for _ in range(2):
            with pytest.raises(SelfTestError):
                load(folder, device="cpu")
    load(folder, device="cpu")
    assert checks() == 3


def test_weights_that_the_library_reads_in_its_own_way_are_left_to_it(
    tmp_path: Path, checks: Watch
) -> None:
    """Of a base model: no name begins as those of the whole model do."""
    folder = save_fusable(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(folder / WEIGHTS)
    renamed = {name.removeprefix("model."): each for name, each in weights.items()}
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    first = load(folder, device="cpu")
    assert_same(first, load(folder, device="cpu"))
    assert checks() == 2


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight"])
def test_weights_that_the_library_leaves_out_are_part_of_no_load(
    name: str, tmp_path: Path, checks: Watch
) -> None:
    """Its files hold what the model they describe has not."""
    folder = save_fusable(tmp_path / "model")
    plain = load(folder, device="cpu")
    weights = load_file(folder / WEIGHTS)
    names = [f"model.layers.{layer}.{name}" for layer in range(2)]
    if name.endswith("bias"):
        names += [each.replace("q_proj", other) for each in names for other in ("k_proj", "v_proj")]
    for each in names:
        rows = weights[each.replace(".bias", ".weight")].shape[0] if "bias" in each else 8
        weights[each] = torch.ones(rows)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    first, second = load(folder, device="cpu"), load(folder, device="cpu")
    assert_same(first, second)
    for ours, theirs in zip(arrays(plain.body), arrays(second.body), strict=True):
        assert np.array_equal(ours, theirs)
    assert checks() == 3


def test_what_is_remembered_may_be_broken(tmp_path: Path, checks: Watch) -> None:
    folder = save_fusable(tmp_path / "model")
    first = load(folder, device="cpu")
    [record] = (tmp_path / "home" / "remembered").glob("body-*.json")
    for content in (b"", b"{", b"\xff\xfe", record.read_bytes().replace(b'"plan"', b'"plain"')):
        record.write_bytes(content)
        assert_same(first, load(folder, device="cpu"))
    assert checks() == 5


def test_a_model_that_does_not_fit_is_refused_the_second_time_too(tmp_path: Path) -> None:
    folder = save_fusable(tmp_path / "model")
    load(folder, device="cpu")
    with pytest.raises(InsufficientMemoryError):
        load(folder, device="cpu", memory_bytes=1000)
