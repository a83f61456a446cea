"""The vocabulary index: whole or not at all, its model's own, the same every time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.body.loading import load
from lexshard.actors.index.build import TIER_KINDS, IndexSettings, build_index
from lexshard.actors.index.errors import IndexFileError, IndexMismatchError
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.hidden import RANDOM_TOKENS, hidden_states
from lexshard.actors.index.metadata import NEEDS
from lexshard.actors.index.tightness import TOP_K, measure_tiers, thresholds
from lexshard.kernels.bounds import summarise
from lexshard.kernels.quantize import quantize
from lexshard.kernels.screen import screen
from lexshard.serve_app.cli import main
from tests.support.index_cases import SETTINGS, STEPS, Interrupted, Silent, Tiny, load_index
from tests.support.paths import DEMO, ROOT

# -- the file -------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    build_index(tiny.folder, tiny.model, again, SETTINGS, progress=Silent())
    assert again.read_bytes() == tiny.path.read_bytes()
    other = IndexSettings(clusters=9, iterations=4, seed=6)
    build_index(tiny.folder, tiny.model, again, other, progress=Silent())
    assert again.read_bytes() != tiny.path.read_bytes()


@pytest.mark.parametrize(
    ("step", "within"), [*((step, False) for step in STEPS), ("clusters", True)]
)
def test_an_interrupted_build_goes_on_to_the_same_file(
    tiny: Tiny, tmp_path: Path, step: str, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "index.safetensors"
    with pytest.raises(KeyboardInterrupt):
        build_index(
            tiny.folder, tiny.model, out, SETTINGS, progress=Interrupted(step, within=within)
        )
    assert not out.exists()
    done = STEPS.index(step)
    assert len(list(tmp_path.iterdir())) == done  # one finished part each, nothing half-written
    made: list[str] = []

    def counted(weight: torch.Tensor, kind: Any, **options: Any) -> Any:
        made.append(kind)
        return quantize(weight, kind, **options)

    monkeypatch.setattr("lexshard.actors.index.build.quantize", counted)
    build_index(tiny.folder, tiny.model, out, SETTINGS, progress=Silent())
    assert out.read_bytes() == tiny.path.read_bytes()
    assert list(tmp_path.iterdir()) == [out]
    finished = {name.removeprefix("tier.") for name in STEPS[:done]}
    assert set(made) == set(TIER_KINDS) - finished


def test_a_damaged_or_foreign_part_is_made_again(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "index.safetensors"
    with pytest.raises(KeyboardInterrupt):
        build_index(tiny.folder, tiny.model, out, SETTINGS, progress=Interrupted("writing"))
    parts = sorted(tmp_path.iterdir())
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    parts[1].write_bytes(parts[2].read_bytes())
    build_index(tiny.folder, tiny.model, out, SETTINGS, progress=Silent())
    assert out.read_bytes() == tiny.path.read_bytes()


def test_other_weights_are_refused_naming_both_hashes(tiny: Tiny) -> None:
    weight = tiny.head.weight.clone()
    weight[50, 3] = torch.nextafter(weight[50, 3], torch.tensor(9.0))
    ours = describe_weights(weight, tiny.head.bias).hash
    theirs = describe_weights(tiny.head.weight, tiny.head.bias).hash
    with pytest.raises(IndexMismatchError, match="lexshard index build") as caught:
        load_index(tiny.path, weight, tiny.head.bias)
    assert ours in str(caught.value)
    assert theirs in str(caught.value)
    for bias in (None, torch.zeros(97)):
        with pytest.raises(IndexMismatchError):
            load_index(tiny.path, tiny.head.weight, bias)
    with pytest.raises(IndexMismatchError):
        load_index(tiny.path, tiny.head.weight[:96], tiny.head.bias)


@pytest.mark.slow
def test_every_flipped_byte_is_noticed(tiny: Tiny, tmp_path: Path) -> None:
    """300 random places of the file and every 16th byte of its start: header and tensors."""
    content = tiny.path.read_bytes()
    generator = np.random.default_rng(0)
    places = [*range(0, 2000, 16), *generator.integers(0, len(content), 300).tolist()]
    damaged = tmp_path / "damaged.safetensors"
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.integers(8)
        damaged.write_bytes(flipped)
        with pytest.raises(IndexFileError):
            tiny.load(damaged)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 5_000, -1])
def test_a_truncated_file_is_a_clear_error(tiny: Tiny, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(tiny.path.read_bytes()[:length])
    with pytest.raises(IndexFileError, match=r"cut\.safetensors is damaged"):
        tiny.load(cut)


def test_what_is_no_index_is_a_clear_error(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(IndexFileError, match="there is no vocabulary index"):
        tiny.load(tmp_path / "missing")
    with pytest.raises(IndexFileError, match="not a vocabulary index"):
        tiny.load(tiny.folder / "model.safetensors")
    with pytest.raises(IndexFileError, match=r"no tier int3.*--tiers int8,.*,int3"):
        load_index(tiny.path, tiny.head.weight, tiny.head.bias, tiers=("int3",))


def test_parts_made_by_other_code_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of yesterday's quantiser could mean something else to today's screen."""
    monkeypatch.setattr("lexshard.actors.index.format.code_of", lambda part: "another")
    with pytest.raises(IndexFileError, match="another version"):
        tiny.load()


# -- what is in it --------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every bit, and arrays at the start of a cache line."""
    if is_dataclass(expected):
        assert type(found) is type(expected)
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
        assert found.ctypes.data % 64 == 0
        assert found.flags.c_contiguous
    else:
        assert found == expected


@pytest.mark.parametrize("kind", TIER_KINDS)
def test_tiers_survive_bit_by_bit(tiny: Tiny, kind: Any) -> None:
    index = tiny.load()
    report = index.metadata.tiers[kind]
    fitted = index.hidden[: index.metadata.calibration.fitted]
    mean = fitted.mean(axis=0, dtype=np.float64).astype(np.float32)
    expected = quantize(
        tiny.head.weight,
        kind,
        direction=mean if report.common_direction else None,
        seed=SETTINGS.seed,
    )
    assert_same(index.tiers[kind], expected)


def test_clusters_are_contiguous_and_described_by_their_raw_rows(tiny: Tiny) -> None:
    clusters = tiny.load().clusters
    assert clusters is not None
    assert np.array_equal(np.sort(clusters.order), np.arange(97))
    assert len(clusters.radius) == tiny.load().metadata.clusters.count <= 9  # type: ignore[union-attr]
    expected = summarise(tiny.head.weight, tiny.head.bias, clusters.order, clusters.offsets)
    for name, found, wanted in zip(clusters._fields, clusters, expected, strict=True):
        assert found.dtype == wanted.dtype, name
        assert np.array_equal(found, wanted), name


def test_calibration_is_what_the_model_computes(tiny: Tiny) -> None:
    index = tiny.load()
    report = index.metadata.calibration
    assert report.source == RANDOM_TOKENS
    assert index.hidden.shape == (report.positions, 48) == (256, 48)
    assert report.fitted == 128
    assert np.isfinite(index.hidden).all()


def test_hidden_states_are_those_of_the_chosen_positions() -> None:
    from transformers import AutoModelForCausalLM

    prompt = list(range(40, 104))
    found = hidden_states(load(DEMO, "float32", device="cpu").body, [prompt])
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).base_model
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).last_hidden_state[0].numpy()
    positions = np.linspace(4, 63, 16).round().astype(int)
    np.testing.assert_allclose(found, expected[positions], rtol=1e-3, atol=1e-3)


# -- what it says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TIER_KINDS)
def test_reported_rows_are_those_a_screen_cannot_exclude(tiny: Tiny, kind: Any) -> None:
    """Counted again in float64, one hidden state and row after the other."""
    weight = tiny.head.weight.double().numpy()
    head = HeadWeights(tiny.head.weight, tiny.head.bias, 6.0, 1.5)
    hidden = tiny.load().hidden[:20]
    bias = tiny.head.bias.double().numpy()  # type: ignore[union-attr]
    exact = 6.0 * np.tanh((hidden.astype(np.float64) @ weight.T + bias) * 1.5 / 6.0)
    tau = thresholds(head, hidden)
    np.testing.assert_allclose(tau[:, 0], exact.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(tau[:, 1], np.sort(exact, axis=1)[:, -TOP_K], rtol=1e-4, atol=1e-5)
    tier = quantize(tiny.head.weight, kind)
    (found,) = measure_tiers([tier], head, hidden, tau)
    estimate, row_slack, hidden_slack = screen(hidden, tier, hidden_bits=16)
    upper = (estimate + hidden_slack @ row_slack + bias) * 1.5
    upper = 6.0 * np.tanh(upper / 6.0)
    for need in (0, 1):
        expected = (upper >= tau[:, need, None] * (1 - 1e-6)).sum() / 20
        assert found.kept[NEEDS[need]] == pytest.approx(expected, abs=0.2)
        assert found.kept[NEEDS[need]] >= (1, TOP_K)[need]
    if found.refined is not None:
        assert all(found.refined[need] <= found.kept[need] for need in NEEDS)
        assert found.refined["top-50"] >= TOP_K
    assert found.bound > found.error > 0


def test_the_form_that_reads_fewer_bytes_is_stored(tiny: Tiny) -> None:
    """The random head's hidden states have hardly a common direction; with one added it pays."""
    for report in tiny.load().metadata.tiers.values():
        assert report.alternative is not None
        assert report.tightness.mean_bytes <= report.alternative.mean_bytes


def test_show_reports_from_the_file_alone_without_torch(tiny: Tiny) -> None:
    code = (
        "import sys; from lexshard.serve_app.cli import main; "
        f"assert main(['index', 'show', {str(tiny.path)!r}]) == 0; "
        "assert not {'torch', 'numba', 'faiss', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    digest = describe_weights(tiny.head.weight, tiny.head.bias).hash
    for expected in (digest[:16], "97 x 48 float32 with biases", "random token ids", *TIER_KINDS):
        assert expected in done.stdout


def test_show_of_no_index_exits_with_2(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(tiny.path.read_bytes()[:-100])
    for path in (torn, tmp_path / "missing"):
        assert main(["index", "show", str(path)]) == 2
        assert capsys.readouterr().err.startswith("lexshard: ")


def test_build_command_prints_decisions_and_report(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index.safetensors"
    words = ["index", "build", str(tiny.folder), "--out", str(out), "--threads", "1"]
    code = main([*words, "--clusters", "9", "--iterations", "4", "--seed", "5"])
    assert code == 0
    printed = capsys.readouterr().out
    assert "9 euclidean, 4 iterations" in printed
    assert "rows that a tier cannot exclude" in printed
    assert out.read_bytes() == tiny.path.read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "no model folder"),
        (["MODEL", "--tiers", "int8,int3"], "no tier int3: choose among int8"),
    ],
)
def test_build_command_refuses_with_one_line(
    tiny: Tiny, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny.folder) if word == "MODEL" else word for word in words]
    assert main(["index", "build", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("lexshard: ")
    assert reason in error
