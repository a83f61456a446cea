"""Every causal language model that transformers knows is served and equal, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from lexshard.loadtest.model_families.probe import FamilyOutcome, probe
from lexshard.loadtest.model_families.report import BEGIN, END, section, write_section
from lexshard.loadtest.model_families.shrink import WINDOW, tiny_configuration
from lexshard.loadtest.model_families.sweep import families, sweep
from tests.support.paths import ROOT


def test_a_family_of_each_kind(tmp_path: Path) -> None:
    assert probe("hunyuan_v1_moe", tmp_path / "a") == FamilyOutcome("hunyuan_v1_moe", "invariant")
    assert probe("dbrx", tmp_path / "b") == FamilyOutcome("dbrx", "served")
    refused = probe("gpt_oss", tmp_path / "c")
    assert (refused.verdict, "s_aux" in refused.reason) == ("refused", True)
    unwritten = probe("gemma4_assistant", tmp_path / "d")
    assert (unwritten.verdict, "differ in head_dim" in unwritten.reason) == ("refused", True)


def test_a_tiny_configuration_has_every_kind_of_layer() -> None:
    config = tiny_configuration("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.num_hidden_layers, config.sliding_window) == (2, WINDOW)
    assert tiny_configuration("gemma3").text_config.hidden_size == config.hidden_size == 64


def test_outcomes_are_grouped_by_reason(tmp_path: Path) -> None:
    outcomes = [
        FamilyOutcome("one", "invariant"),
        FamilyOutcome("two", "refused", "two has layers of type conv: choose another model"),
        FamilyOutcome("three", "refused", "ThreeAttention is layer 7 of 9: choose another model"),
        FamilyOutcome("four", "refused", "four has layers of type conv: choose another model"),
    ]
    document = tmp_path / "models.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_section(document, outcomes)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "### Served and batch-invariant (1)\n\none\n" in text
    assert "| the model has layers of type conv | two, four |\n" in text
    assert "| an attention layer is layer n of n | three |\n" in text
    document.write_text("no marks")
    with pytest.raises(ValueError, match="needs the lines"):
        write_section(document, outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_family_ends_with_a_traceback() -> None:
    outcomes = sweep(families(), at_once=2)
    bugs = [each for each in outcomes if each.verdict in ("wrong", "broken")]
    assert bugs == []
    documented = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," in documented:
        assert section(outcomes) in documented
