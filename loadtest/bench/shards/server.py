"""A process that serves one shard after the other on a port and a core, as lines of
`loadtest.bench.shards.processes.ServerOrder` say; it ends with its input."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch

from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.process_tree import die_with_parent
from lexshard.kernels import pool
from lexshard.loadtest.bench.shards.processes import HOST, PATIENCE, Rhythm, ServerOrder
from lexshard.loadtest.bench.shards.recorded_shard import recorded


def main() -> None:
    die_with_parent()
    port, core = int(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pool.set_threads(1)
    store = open_store(HOST, port, PATIENCE, root=False)
    for line in sys.stdin:
        fields = json.loads(line)
        order = ServerOrder(
            GroupPlan(**fields["plan"]), fields["rank"], fields["part"], Rhythm(**fields["rhythm"])
        )
        part: ShardPart = pickle.loads(Path(order.part).read_bytes())
        rhythm = order.rhythm
        ShardServer(
            recorded(build_shard(part), rhythm.computed, rhythm.repeated),
            part.owned.ids,
            SequenceStates(part.owned.vocabulary_size, part.eos_ids, 1),
            join(order.plan, order.rank, store=store),
        ).run()


if __name__ == "__main__":
    main()
