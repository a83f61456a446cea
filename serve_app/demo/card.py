"""The model cards of the pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lexshard.serve_app.demo.export import TEMPERATURE, TOP_K, TOP_P
from lexshard.serve_app.demo.recipe import DemoRecipe, Mixture, NetworkShape, Schedule

_FRONT_MATTER = """\
---
language: en
license: {licence}
library_name: transformers
pipeline_tag: text-generation
tags: [demo, tiny, llama]
---
"""

_SHIPPED_FILES = {
    "gutenberg_children_stories.txt.xz",
    "gutenberg_classic_novels.txt.xz",
    "sgd_dialogues.jsonl.xz",
}

_SHIPPED_LICENCE = """\
| file | what it is | origin | licence |
| --- | --- | --- | --- |
| gutenberg_children_stories.txt.xz | children's and young people's fiction, 211 books: Baum, \
Andersen, Grimm, Lang, Carroll, Burnett, Nesbit, Montgomery, Alcott, Alger, Kipling, Barrie | \
[rcdm-uga/Gutenberg_Text](https://github.com/rcdm-uga/Gutenberg_Text) (a0b16d35a9) | public domain \
in the USA; the named authors died in 1942 or earlier, translators not checked |
| gutenberg_classic_novels.txt.xz | novels and stories, 245 books: Austen, Doyle, Twain, Wells, \
Stevenson, Verne, Dickens, Hardy and others | \
[rcdm-uga/Gutenberg_Text](https://github.com/rcdm-uga/Gutenberg_Text) (a0b16d35a9) | public domain \
in the USA; the named authors died in 1946 or earlier, translators not checked |
| sgd_dialogues.jsonl.xz | Schema-Guided Dialogue, task chat between a user and a system | \
[google-research-datasets/dstc8-schema-guided-dialogue]\
(https://github.com/google-research-datasets/dstc8-schema-guided-dialogue) (e852981ae3) | \
CC BY-SA 4.0 |

The Schema-Guided Dialogue data set is by Abhinav Rastogi, Xiaoxue Zang, Srinivas Sunkara, Raghav
Gupta and Pranav Khaitan (Google): "Towards Scalable Multi-Domain Conversational Agents: The
Schema-Guided Dialogue Dataset", licensed
[CC BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/). Changes made here: its annotations
were dropped and its turns put into this model's chat template. These weights, the prompts in
`evaluation.json` and the samples in these cards derive from it and are shared under the same
licence, **CC BY-SA 4.0**.
"""

_OTHER_LICENCE = """\
Trained on: {files}. The terms of those texts decide the terms of these weights.
"""


def _licence_name(files: list[str]) -> str:
    return "cc-by-sa-4.0" if set(files) == _SHIPPED_FILES else "other"


def _front_matter(files: list[str]) -> str:
    return _FRONT_MATTER.format(licence=_licence_name(files))


def _licence(files: list[str]) -> str:
    shipped = set(files) == _SHIPPED_FILES
    text = _SHIPPED_LICENCE if shipped else _OTHER_LICENCE.format(files=", ".join(files))
    return f"## Data and licence\n\n{text}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _shape_line(shape: NetworkShape, parameters: int) -> str:
    return (
        f"`LlamaForCausalLM`, {parameters:,} parameters: {shape.layers} layers of width "
        f"{shape.hidden}, {shape.heads} heads of {shape.head_size} ({shape.kv_heads} key-value "
        f"heads), feed-forward {shape.intermediate}, {shape.vocabulary:,} tokens, "
        f"{shape.positions:,} positions, tied embeddings, bfloat16."
    )


def _bits_table(table: dict[str, dict[str, float]]) -> str:
    columns = [name for name in table["all"] if name != "bytes"]
    lines = [
        "| held-out text | bytes | " + " | ".join(columns) + " |",
        "| --- | ---: |" + " ---: |" * len(columns),
    ]
    for name, row in table.items():
        cells = " | ".join(f"{row[column]:.3f}" for column in columns)
        lines.append(f"| {name} | {int(row['bytes']):,} | {cells} |")
    return "\n".join(lines)


def _match_table(result: dict[str, Any]) -> str:
    best, drawn = result["best_token_match_rate"], result["drawn_token_match_rate"]
    lines = [
        f"| text written by the target | best tokens agree | drawn at {TEMPERATURE} agree |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {name} | {_percent(best[name])} | {_percent(drawn[name])} |" for name in best]
    return "\n".join(lines)


def _training(training: dict[str, Any]) -> str:
    return (
        f"{training['tokens']:,} tokens in {training['steps']:,} steps, "
        f"{training['seconds'] / 60:.0f} wall-clock minutes with {training['workers']} worker "
        f"threads on {training['machine']}, seed {training['seed']}."
    )


def _samples(samples: list[dict[str, str]]) -> str:
    blocks = [f"````text\n{sample['prompt']}⟶{sample['answer']}\n````" for sample in samples]
    return "\n\n".join(blocks)


_COMMAND = """\
## How it was made

```
lexshard demo train --data DIR --out DIR{target} --seed {seed}
```

The first `DIR` holds the texts named below. The recipe is `serve_app/demo/recipe.py`: Muon for the
body matrices and Adam for embeddings and norms, rates that warm up, hold and decay linearly to
zero, and a sampled softmax that becomes the full one towards the end:

{passes}

Mixture: {mixture}. Story chat is made from the books by rule: a request, then a passage that ends
at a sentence end. Headings, front matter and verse were skipped and curly quotes made straight.
Held out and never trained on: the last {books} books of each collection and every dialogue whose
id starts with `{prefix}`.

{training}

"""


def _pass_line(schedule: Schedule) -> str:
    long = f"{schedule.long_sequence:,} for the last {_percent(schedule.long_fraction)}"
    return (
        f"- {schedule.steps:,} steps of {schedule.batch_tokens:,} tokens in windows of "
        f"{schedule.sequence} tokens{', ' + long if schedule.long_fraction else ''}; Muon rate "
        f"{schedule.muon_rate:g}, Adam rate {schedule.adam_rate:g}, final decay over the last "
        f"{_percent(schedule.decay_fraction)}, full softmax for the last "
        f"{_percent(schedule.full_softmax_fraction)}."
    )


def _command(record: dict[str, Any], schedules: Sequence[Schedule], mixture: Mixture) -> str:
    shares = {
        "children's stories": mixture.children,
        "novels": mixture.novels,
        "dialogues": mixture.dialogues,
        "story chat": mixture.story_chat,
    }
    return _COMMAND.format(
        seed=record["seed"],
        target=" --target DIR" if record.get("target_kept") else "",
        passes="\n".join(map(_pass_line, schedules)),
        mixture=", ".join(f"{100 * share:.0f} % {name}" for name, share in shares.items()),
        books=mixture.held_out_books,
        prefix=mixture.held_out_dialogue_prefix,
        training=_training(record),
    )


def target_card(result: dict[str, Any], recipe: DemoRecipe) -> str:
    """The card of the target."""
    ended = result["ended_prompts"]
    record = result["training"]["target"]
    files = result["training"]["files"]
    return f"""{_front_matter(files)}
# lexshard-demo

A tiny language model that ships with lexshard so that a serving cluster can be tried, tested and
measured without downloading anything. {_shape_line(recipe.target, result["parameters"]["target"])}

**What it is not.** It saw {record["tokens"] / 1e6:.1f} million tokens of old books and booking
dialogues. It writes 19th-century storybook English and imitates the dialogues: most sentences are
grammatical, few follow from the one before, and words repeat. It knows nothing about the world,
invents names, numbers and addresses, mixes up who is speaking, and answers requests outside its
booking dialogues and stories with something unrelated. The books carry the attitudes of their
time, some offensive, and the model can repeat them. Do not use it for anything but exercising
software.

`lexshard-demo-draft` is its draft for speculative decoding, with the same tokenizer.

Chat turns are `<|user|>`, `<|assistant|>` and `<|system|>`, each closed by `<|end|>`; the template
is in the tokenizer. Generation stops at `<|end|>` or `<|endoftext|>`; defaults are temperature
{TEMPERATURE}, top-k {TOP_K}, top-p {TOP_P}.

{_command(record, recipe.target_schedules, recipe.mixture)}{_licence(files)}
## Measured

Bits per byte of held-out text (lower is better). Dialogue bytes count what the speakers say; the
model also pays for the template tokens. `unigram` codes the same tokens by their training
frequency; `xz -9e` compresses the same bytes.

{_bits_table(result["bits_per_byte"])}

Of {ended["prompts"]} held-out dialogue prompts, answers that end by themselves inside
{ended["tokens"]} tokens: {ended.get("greedy", 0)} greedy, {ended.get("sampled", 0)} sampled at the
defaults.

How often the draft's best token is the target's, and how often the token is that each of them draws
with the same noise:

{_match_table(result)}

## Samples

Sampled once at the defaults, unedited; the arrow marks where the model begins.

{_samples(result["samples"])}
"""


def draft_card(result: dict[str, Any], recipe: DemoRecipe) -> str:
    """The card of the draft."""
    record = result["training"]["draft"]
    files = result["training"]["files"]
    return f"""{_front_matter(files)}
# lexshard-demo-draft

The draft model of `lexshard-demo` for speculative decoding, with the same tokenizer.
The tokenizer files are the target's, byte for byte, so that this folder is a whole checkpoint.
{_shape_line(recipe.draft, result["parameters"]["draft"])}

Its embedding began as the target's, projected on its principal directions; it was then distilled
from the target on the same texts: cross entropy between the softmaxes of both at temperature
{TEMPERATURE}. By itself it writes worse than the target, which is tiny already; read that
card for the warnings, which hold here as well.

{_command(record, [recipe.draft_schedule], recipe.mixture)}{_licence(files)}
## Measured

How often its best token is the target's, and how often the token is that each of them draws with
the same noise, on text the target wrote for held-out prompts:

{_match_table(result)}

Bits per byte of held-out text:

{_bits_table(result["bits_per_byte"])}
"""


def write_cards(
    result: dict[str, Any], recipe: DemoRecipe, target_folder: Path, draft_folder: Path
) -> None:
    """Write both cards."""
    (target_folder / "README.md").write_text(target_card(result, recipe), encoding="utf-8")
    (draft_folder / "README.md").write_text(draft_card(result, recipe), encoding="utf-8")
