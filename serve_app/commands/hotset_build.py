"""``lexshard hotset build``: the tokens a sampler looks at first, and how many of them pay."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lexshard.actors.hub_cache import in_hub_cache
from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.serve_app.commands.argument_types import at_least, file_path

REFUSALS = (ValueError, OSError)  # among them every refusal of a model
INTERRUPTED = "nothing was written"


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
        "--out", type=file_path, metavar="FILE", help="default: hot.lexshard beside the model"
    )
    parser.add_argument(
        "--positions",
        type=at_least(1),
        metavar="N",
        default=256,
        help="to measure at, about (default: 256)",
    )
    parser.add_argument(
        "--generate",
        type=at_least(0),
        default=32,
        metavar="N",
        help="tokens by which the model continues a text (default: 32; 0: none)",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: one per core")


def run(arguments: argparse.Namespace) -> None:
    """Build and report."""
    missing = [str(path) for path in arguments.traces or () if not path.is_file()]
    if missing:
        raise ValueError(f"no traces at {', '.join(missing)}")
    folder = Path(model_folder(arguments.model, tell, loading=LoadingOptions(arguments.dtype)))
    if not folder.is_dir():
        raise ValueError(f"no model folder at {folder}")
    if arguments.out is None and in_hub_cache(folder):
        raise ValueError(f"{arguments.model} is in the Hub's cache: say with --out where to write")
    # Seconds: a mistyped name should not wait for it.
    from lexshard.actors.configuration import EngineConfiguration
    from lexshard.actors.decision.hot_vocabulary.build import build_hot_file
    from lexshard.actors.decision.hot_vocabulary.file import FILE_NAME, describe, write_hot_file
    from lexshard.actors.engine.engine import Engine
    from lexshard.actors.index.hidden import calibration_prompts, load_tokenizer
    from lexshard.actors.messages import SamplingParameters
    from lexshard.actors.text.traces import Traces, read_traces
    from lexshard.kernels.team.cores import available_cores

    engine = Engine(
        EngineConfiguration(
            model=str(folder),
            dtype=arguments.dtype,
            threads=arguments.threads or available_cores(),
            head="dense",
        )
    )
    model = engine.model
    tokenizer = load_tokenizer(folder)
    if arguments.traces:
        traces = read_traces(arguments.traces, tokenizer, model.vocabulary_size)
    else:
        found = calibration_prompts(
            tokenizer, model.vocabulary_size, model.max_positions, arguments.seed
        )
        traces = Traces((found.source,), tuple(map(tuple, found.token_ids)))
    print(
        f"lexshard hotset build: {folder}, {model.vocabulary_size:,} tokens; "
        f"{len(traces.texts):,} texts of {', '.join(traces.sources)}; "
        f"{arguments.generate} tokens generated a text; seed {arguments.seed}",
        flush=True,
    )

    def continue_texts(prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
        parameters = SamplingParameters(temperature=1.0, max_tokens=count, seed=arguments.seed)
        return [done.token_ids for done in engine.generate(prompts, parameters)]

    hot = build_hot_file(
        folder,
        model,
        traces.texts,
        continue_texts,
        sources=traces.sources,
        positions=arguments.positions,
        generated=arguments.generate,
        seed=arguments.seed,
    )
    out = arguments.out or folder / FILE_NAME
    write_hot_file(out, hot)
    print(describe(out, hot))
