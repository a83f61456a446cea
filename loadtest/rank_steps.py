"""Steps of a body on several ranks, by turns, and what each of its processes holds.

    python -m lexshard.loadtest.rank_steps --model models/lexshard-demo --ranks 1,2

Ranks are processes of this machine. With ``--random`` the model has random weights and 18 layers of
width 640 (`loadtest.bench.synthetic.random_model`). The fastest turn is what the machine can do;
the median tells what else it does. Memory is told when every block of the cache has been written
to; with ``--turns 0`` nothing else is, and a first run has compared what a second one remembers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel
from lexshard.actors.body.parallel.parallel_body import ParallelBody
from lexshard.cluster.ranks.processes import RankProcesses
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.loadtest.bench.synthetic.random_model import write_random_model

ROWS = (1, 8, 64)
CONTEXT = 96  # tokens before the row of each sequence
BLOCKS = CONTEXT // BLOCK_SIZE + 1  # of a sequence
SECONDS = 60.0  # that a rank may keep another waiting
MEBI = 2**20


def step(rows: int, vocabulary: int, position: int = CONTEXT) -> Batch:
    """A token each of so many sequences."""
    tables = np.arange(rows * BLOCKS, dtype=np.int32).reshape(rows, BLOCKS)
    every = np.arange(rows, dtype=np.int32)
    return Batch(
        token_ids=(7919 * every % vocabulary).astype(np.int32),
        positions=np.full(rows, position, np.int32),
        slots=tables[:, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE,
        row_sequence=every,
        block_tables=tables,
        output_rows=every,
    )


def told_memory(process_id: int) -> str:
    """Resident memory, and what of it is the process's own."""
    memory = psutil.Process(process_id).memory_full_info()
    return f"{memory.rss / MEBI:,.0f} MiB resident, {memory.uss / MEBI:,.0f} its own"


def loaded(model: Path, ranks: int) -> tuple[LoadedModel, ParallelBody]:
    """The model, and its body with room for the largest step, all of it written to."""
    found = load_parallel(model, ParallelOptions(ranks), partial(RankProcesses, seconds=SECONDS))
    body = found.body
    assert isinstance(body, ParallelBody)
    body.allocate_cache(max(ROWS) * BLOCKS)
    for position in range(0, CONTEXT + 1, BLOCK_SIZE):
        body.forward(step(max(ROWS), body.vocabulary_size, position))
    return found, body


def measure(model: Path, numbers: list[int], turns: int) -> None:
    bodies: dict[int, ParallelBody] = {}
    try:
        for ranks in numbers:
            found, bodies[ranks] = loaded(model, ranks)
            print(f"{ranks} ranks: {told_memory(os.getpid())} (rank 0, with all before it)")
            for role in bodies[ranks].roles():
                print(f"  {role.detail}: {told_memory(role.place.process_id)}")
            cache = max(ROWS) * BLOCKS * bodies[ranks].kv_bytes_per_block() / ranks
            print(f"  {cache / MEBI:,.0f} MiB of keys and values in each, where heads divide")
            layers, width = found.body.num_layers, found.body.hidden_size
            sent = (2 * layers + 1) * 4 * width * (ranks.bit_length() - 1)
            print(f"  {sent:,} bytes sent by each rank per token")
        for rows in ROWS if turns else ():
            taken: dict[int, list[float]] = {ranks: [] for ranks in numbers}
            for turn in range(turns + 1):
                for ranks, body in bodies.items():
                    batch = step(rows, body.vocabulary_size)
                    began = time.perf_counter()
                    body.forward(batch)
                    if turn:  # the first one touches memory
                        taken[ranks].append(1000.0 * (time.perf_counter() - began))
            words = (
                f"{ranks} ranks {min(each):.2f} ms ({statistics.median(each):.2f})"
                for ranks, each in taken.items()
            )
            print(f"{rows} rows, fastest (median): {', '.join(words)}", flush=True)
    finally:
        for body in bodies.values():
            body.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/lexshard-demo"))
    parser.add_argument("--random", action="store_true", help="random weights instead of --model")
    parser.add_argument("--ranks", default="1,2", metavar="N,...")
    parser.add_argument("--turns", type=int, default=16)
    arguments = parser.parse_args()
    numbers = [int(each) for each in arguments.ranks.split(",")]
    if not arguments.random:
        measure(arguments.model, numbers, arguments.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder))
        measure(Path(folder), numbers, arguments.turns)


if __name__ == "__main__":
    main()
