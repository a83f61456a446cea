"""Every kernel that serving launches on a GPU, compiled at the shapes of real models.

Down to machine code for compute capability 9.0, without a device, with the Triton that is
installed. `python -m tests.support.served_kernels` does the same for another one in its path.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

GROUPS = (
    "attention-bf16",
    "attention-fp16",
    "attention-fp32",
    "int8",
    "search",
    "rows",
)
# Instructions in the loop of one row's screen, which reads 128 rows of 128 bytes a time. More would
# bind the screen by arithmetic, not by memory.
MOST_INSTRUCTIONS = {"int8": 300}


def _compile(group: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.served_kernels", group]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[1:]


def _loop(row: str) -> int:
    """The instructions in a loop that a row of the table tells."""
    return int(row.split(" in a loop")[0].split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_no_served_kernel_spills_registers_or_asks_for_too_much_memory(group: str) -> None:
    """Prints what each takes: registers, shared memory, instructions."""
    pytest.importorskip("triton")
    rows = _compile(group)
    assert rows
    most = MOST_INSTRUCTIONS.get(group)
    if most is not None:
        screens = [row for row in rows if "hidden_kernel" not in row and " 1 rows" in row]
        assert screens
        assert all(_loop(row) < most for row in screens), screens


def test_every_group_is_compiled() -> None:
    pytest.importorskip("triton")
    from tests.support.served_kernels import GROUPS as EVERY

    assert set(EVERY) == set(GROUPS)
