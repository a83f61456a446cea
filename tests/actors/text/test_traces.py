"""Traces: what a model is asked and answers, in every form that files have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lexshard.actors.text.token_bytes import byte_level_alphabet
from lexshard.actors.text.traces import read_traces

VOCABULARY = 16_384


def test_traces_are_read_in_every_form(tmp_path: Path, demo_tokenizer: object) -> None:
    lines = [
        {"token_ids": [5, 6, 7]},
        {"text": "Once upon a time"},
        {"prompt": "Once upon a time"},
        {"prompt": [8, 9]},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    plain = tmp_path / "story.txt"
    plain.write_text("Once upon a time\n\n\nThe end.\n")
    traces = read_traces([path, plain], demo_tokenizer, VOCABULARY)
    assert traces.sources == ("talk.jsonl", "story.txt")
    assert len(traces.texts) == 7
    assert traces.texts[0] == (5, 6, 7)
    assert traces.texts[1] == traces.texts[2] == traces.texts[5]
    assert traces.texts[3] == (8, 9)

    for bad, message in (
        ("{", "line 1 is not JSON"),
        ('{"question": "?"}', "line 1 has none of"),
        ('{"prompt": 3}', "neither text nor token ids"),
        ('{"messages": "Hi"}', "messages need"),
        ('{"token_ids": [16384]}', "another model"),
        ("", "no text in"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_traces([path], demo_tokenizer, VOCABULARY)
    with pytest.raises(ValueError, match="no tokenizer"):
        read_traces([plain], None, VOCABULARY)


def test_texts_hold_line_ends_of_every_kind_and_begin_once(tmp_path: Path) -> None:
    """JSON may hold what Python takes for a line's end; a template writes its BOS itself."""
    made = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    made.add_special_tokens(["<s>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    said = ["a\u2028b", "a\u2029b", "a\x85b"]
    lines = [{"text": each} for each in said]
    lines += [{"messages": [{"role": "user", "content": each}]} for each in said]
    path = tmp_path / "talk.jsonl"
    path.write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    traces = read_traces([path], tokenizer, VOCABULARY)
    assert traces.texts == (*((256, *each.encode()) for each in said),) * 2
