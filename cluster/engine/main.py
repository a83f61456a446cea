"""An engine's process, as the keeper of a server's processes starts it:
``python -m lexshard.cluster.engine.main``, told an `EngineOrder`.

Questions are answered on a socket file, in the words of `cluster.engine.own_process`.
"""

from __future__ import annotations

import sys
import threading

import msgspec

from lexshard.actors.configuration import EngineConfiguration
from lexshard.cluster.engine.own_process import EngineOrder, answer_questions
from lexshard.cluster.engine.process import EngineProcess
from lexshard.cluster.process_tree import leave
from lexshard.cluster.roles.process import end_with_owner, read_order


def main() -> int:
    """Serves until told to stop; the exit code."""
    order = read_order(EngineOrder)
    end_with_owner()
    process = EngineProcess(msgspec.convert(order.configuration, EngineConfiguration))
    answer_questions(process, order.path)
    try:
        process.serve()
    except Exception as error:
        if process.ready:
            raise
        # Clients are told why there is no engine, which takes a process: it stays for that.
        try:
            print(f"lexshard: the engine could not start: {error}", file=sys.stderr, flush=True)
        finally:  # also where what read it has gone
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    leave(main())
