"""The answer of a function from a process that ends with it: what reads a model takes hundreds of
megabytes, which the owner of a server would keep."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib import import_module
from typing import Any


def answer_apart(module: str, function: str, *arguments: object) -> Any:
    """``function(*arguments)``, of a ``module`` that is not imported here.

    Raises what it raises, and RuntimeError where its process ends without an answer.
    """
    command = [sys.executable, "-P", "-m", "lexshard.cluster.apart"]
    asked = subprocess.run(
        command, input=pickle.dumps((module, function, arguments)), capture_output=True, check=False
    )
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {asked.returncode}")
    raised, found = pickle.loads(asked.stdout)
    if raised is not None:
        raise raised
    return found


def main() -> None:
    """Answers what stands on standard input; what libraries print goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    module, function, arguments = pickle.load(sys.stdin.buffer)
    raised, found = None, None
    try:
        found = getattr(import_module(module), function)(*arguments)
    except Exception as error:
        raised = error
    with os.fdopen(answers, "wb") as stream:
        pickle.dump((raised, found), stream)


if __name__ == "__main__":
    main()
