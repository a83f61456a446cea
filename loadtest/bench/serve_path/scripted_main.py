"""The process of an engine that computes nothing, for a server in plain processes; it makes as many
tokens per second as the variable ``RATE`` says."""

from __future__ import annotations

import os
import sys
from functools import partial

from lexshard.cluster.engine.main import main
from lexshard.loadtest.bench.serve_path.scripted_engine import ScriptedEngineProcess

RATE = "LEXSHARD_SCRIPTED_TOKENS_PER_SECOND"

if __name__ == "__main__":
    sys.exit(main(partial(ScriptedEngineProcess, tokens_per_second=float(os.environ[RATE]))))
