"""A server where a process may open few files: it takes what there is, and says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from lexshard.cluster.ingress import MOST_CONNECTIONS, connections_that_fit
from lexshard.cluster.ports import free_port
from lexshard.serve_app.start.preflight import LEAST_FILES, LEAST_FILES_ON_RAY
from tests.support.backends import PROCESS_AND_SLOW_RAY, Backend
from tests.support.mock_server import model_folder
from tests.support.paths import ROOT
from tests.support.real_server import limit_files, running_server

FILES, CONNECTIONS = 1024, 448
RESTING = 400  # clients that are connected and ask nothing


@pytest.mark.slow
@pytest.mark.parametrize("backend", PROCESS_AND_SLOW_RAY)
def test_with_a_hard_limit_of_1024_it_serves_as_many_as_fit(
    tmp_path: Path, backend: Backend
) -> None:
    with running_server(tmp_path, backend=backend, most_files=FILES) as server:
        told = server.log.read_text()
        assert f"a process may open 1,024 files here: at most {CONNECTIONS} connections" in told
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with ExitStack() as connected:
            for _ in range(RESTING):
                connected.enter_context(socket.create_connection(address, timeout=10))
            reply = server.client().completions.create(
                model="lexshard-demo", prompt="Once upon a time", max_tokens=4
            )
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("backend", "least"), [("process", LEAST_FILES), ("ray", LEAST_FILES_ON_RAY)]
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, backend: Backend, least: int
) -> None:
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "serve", str(model_folder(tmp_path))]
    refused = subprocess.run(
        [*command, "--port", str(free_port()), "--backend", backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=partial(limit_files, least - 1),
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        f"lexshard: a process may open {least - 1} files here, {least}"
    )
    assert "ulimit -Hn" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_low_soft_limit_is_raised_without_a_word(tmp_path: Path) -> None:
    """In this process's child, as a shell starts it: 1,024 of many."""
    look = """
import resource
from lexshard.serve_app.start.preflight import make_room
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
make_room(False, print)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    if connections_that_fit() < MOST_CONNECTIONS:
        pytest.skip("the hard limit is low here")
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) >= 2 * MOST_CONNECTIONS
