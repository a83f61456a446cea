"""An engine's process, as the keeper of a server's processes starts it:
``python -m lexshard.cluster.engine.main``.

Standard input brings an `EngineOrder` as one line of JSON and stays open: its end is the end of its
owner. Questions are answered on a socket file, in the words of `cluster.engine.own_process`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import msgspec

from lexshard.actors.configuration import EngineConfiguration
from lexshard.cluster.engine.own_process import EngineOrder, answer_questions
from lexshard.cluster.engine.process import EngineProcess
from lexshard.cluster.process_tree import leave


def main(make: Callable[[EngineConfiguration], EngineProcess] = EngineProcess) -> int:
    """Serves until told to stop; the exit code."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOrder)
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    process = make(msgspec.convert(order.configuration, EngineConfiguration))
    answer_questions(process, order.path)
    try:
        process.serve()
    except Exception as error:
        if process.ready:
            raise
        # Clients are told why there is no engine, which takes a process: it stays for that.
        print(f"lexshard: the engine could not start: {error}", file=sys.stderr, flush=True)
        threading.Event().wait()
    return 0


def _end_with_standard_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    leave(main())
