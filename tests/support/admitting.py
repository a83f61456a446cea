"""API processes that do nothing but let requests in and out, and write down what they held."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from lexshard.serve_app.admission import Admission, Ticket
from lexshard.serve_app.api_processes.accounts import SharedAccounts
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.openai.errors import ApiError

PROCESSES = 3
SEQUENCES, WAITING, PER_CLIENT = 12, 200, 5
CLIENTS = ("a", "b", "c", "d", "e", "f")


def admission(folder: Path, per_client: int | None = PER_CLIENT) -> Admission:
    """One process's own view of the shared accounts in ``folder``."""
    accounts = SharedAccounts(Seats(folder, PROCESSES), SEQUENCES)
    return Admission(SEQUENCES, WAITING, per_client, accounts)


def hammer(folder: Path, seed: int, seconds: float) -> None:
    """Begins when it is told to. Prints a line for every ticket: when it was held (a part of the
    time in which it really was), its client, sequences and tokens. A system-wide clock, in
    nanoseconds."""
    draw = random.Random(seed)
    own = admission(folder)
    held: list[tuple[Ticket, int, str, int, int]] = []
    lines: list[str] = []
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while time.monotonic() < end or held:
        if held and (time.monotonic() >= end or draw.random() < 0.5):
            ticket, began, client, sequences, tokens = held.pop(draw.randrange(len(held)))
            lines.append(f"{began} {time.monotonic_ns()} {client} {sequences} {tokens}")
            ticket.release()
            continue
        client, sequences, tokens = draw.choice(CLIENTS), draw.randrange(4), draw.randrange(50)
        try:
            ticket = own.admit(client, sequences, tokens)
        except ApiError:
            continue
        held.append((ticket, time.monotonic_ns(), client, sequences, tokens))
    print("\n".join(lines))


def hold(folder: Path, client: str, sequences: int, tokens: int) -> None:
    """Holds one ticket until it is killed."""
    admission(folder).admit(client, sequences, tokens)
    print("held", flush=True)
    sys.stdin.read()


def main(folder: str, task: str, *arguments: str) -> None:
    if task == "hammer":
        hammer(Path(folder), int(arguments[0]), float(arguments[1]))
    else:
        hold(Path(folder), arguments[0], int(arguments[1]), int(arguments[2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
