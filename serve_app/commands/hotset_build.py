"""``lexshard hotset build``: the tokens a sampler looks at first, and how many of them pay."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lexshard.actors.hub_cache import in_hub_cache
from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.serve_app.commands.argument_types import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("model", metavar="MODEL", help="folder, or ORG/NAME on the Hub")
    parser.add_argument(
        "--traces",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines (token_ids, messages, prompt or text) or plain text of what the model is "
        "asked (default: the bundled passages)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: hot.lexshard beside the model"
    )
    parser.add_argument(
        "--positions",
        type=at_least(1),
        metavar="N",
        help="to measure at (default: at most 256, as many as take about a minute)",
    )
    parser.add_argument(
        "--generate",
        type=at_least(0),
        default=32,
        metavar="N",
        help="tokens by which the model continues a text (default: 32; 0: none)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=".html or .json: measured against fitted throughput",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: one per core")


def run(arguments: argparse.Namespace) -> int:
    """Build and report; returns the exit status."""
    try:
        _build(arguments)
    except (ValueError, OSError) as error:  # among them every refusal of a model
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlexshard: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _build(arguments: argparse.Namespace) -> None:
    missing = [str(path) for path in arguments.traces or () if not path.is_file()]
    if missing:
        raise ValueError(f"no traces at {', '.join(missing)}")
    report = arguments.report
    if report is not None and report.suffix not in (".html", ".json"):
        raise ValueError(f"a report is .html or .json, not {report.name}")
    folder = Path(model_folder(arguments.model, tell, loading=LoadingOptions(arguments.dtype)))
    if not folder.is_dir():
        raise ValueError(f"no model folder at {folder}")
    if arguments.out is None and in_hub_cache(folder):
        raise ValueError(f"{arguments.model} is in the Hub's cache: say with --out where to write")
    # Seconds: a mistyped name should not wait for it.
    from lexshard.actors.configuration import EngineConfiguration
    from lexshard.actors.decision.hot_vocabulary.build import HotVocabularySettings, build_hot_file
    from lexshard.actors.decision.hot_vocabulary.file import FILE_NAME, write_hot_file
    from lexshard.actors.decision.hot_vocabulary.report import describe, write_report
    from lexshard.actors.decision.hot_vocabulary.traces import bundled_traces, read_traces
    from lexshard.actors.engine.engine import Engine
    from lexshard.actors.index.hidden import load_tokenizer
    from lexshard.actors.index.steps import ProgressBar
    from lexshard.actors.messages import SamplingParameters

    settings = HotVocabularySettings(arguments.positions, arguments.generate, arguments.seed)
    engine = Engine(
        EngineConfiguration(
            model=str(folder),
            dtype=arguments.dtype,
            threads=arguments.threads or os.cpu_count() or 1,
            head="dense",
        )
    )
    model = engine.model
    tokenizer = load_tokenizer(folder)
    if arguments.traces:
        traces = read_traces(arguments.traces, tokenizer, model.vocabulary_size)
    else:
        traces = bundled_traces(
            tokenizer, model.vocabulary_size, model.max_positions, settings.seed
        )
    out = arguments.out or folder / FILE_NAME
    decisions = {
        "model": folder,
        "out": out,
        "vocabulary": f"{model.vocabulary_size:,} tokens",
        "traces": f"{', '.join(traces.sources)}: {len(traces.texts):,} texts",
        "generated": f"{settings.generated} tokens a text" if settings.generated else "nothing",
        "seed": settings.seed,
    }
    lines = "\n".join(f"  {name:<24} {value}" for name, value in decisions.items())
    print(f"lexshard hotset build with:\n{lines}", flush=True)

    def continue_texts(prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
        parameters = SamplingParameters(temperature=1.0, max_tokens=count, seed=settings.seed)
        return [done.token_ids for done in engine.generate(prompts, parameters)]

    progress = ProgressBar(4)
    try:
        hot = build_hot_file(folder, model, traces, continue_texts, settings, progress)
    finally:
        progress.close()
    write_hot_file(out, hot)
    print(describe(out, hot))
    if report is not None:
        write_report(report, hot)
        print(f"report: {report}")
