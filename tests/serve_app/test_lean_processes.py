"""What computes is loaded where it computes: the processes around the engine do without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mock_server import model_folder
from tests.support.paths import ROOT

COMPUTING = {"torch", "numba", "llvmlite", "scipy", "transformers", "triton", "faiss", "sympy"}
SPEAKING_HTTP = {"fastapi", "starlette", "uvicorn"}
PARENT = ("lexshard.serve_app.cli", "lexshard.serve_app.commands.serve")
# What a process of that name runs, and what it has no part of.
PROCESSES = {
    "lexshard serve, embedded": (
        (*PARENT, "lexshard.serve_app.start.embedded"),
        {*COMPUTING, *SPEAKING_HTTP, "ray", "numpy"},
    ),
    "lexshard serve, before Ray": (
        (*PARENT, "lexshard.serve_app.start.server_process"),
        {*COMPUTING, *SPEAKING_HTTP, "ray", "numpy"},
    ),
    "API process": (
        ("lexshard.serve_app.api_processes.api_process",),
        {*COMPUTING, "ray", "llguidance", "lexshard.serve_app.description.openapi"},
    ),
    "driver, before it has Ray": (("lexshard.serve_app.start.driver",), {*COMPUTING, "ray"}),
    "driver": (
        (
            "lexshard.serve_app.start.driver",
            "lexshard.cluster.lean.node",
            "lexshard.cluster.engine.ray_actor",
            "lexshard.serve_app.deployment",
            "lexshard.serve_app.replica",
            "lexshard.cluster.topology.reservation",
        ),
        COMPUTING,
    ),
    "replica": (("lexshard.serve_app.deployment",), COMPUTING),
    "replica with an engine": (
        ("lexshard.serve_app.replica", "lexshard.cluster.engine.supervisor"),
        COMPUTING,
    ),
    "engine's actor, before its model": (
        ("lexshard.cluster.engine.ray_actor",),
        COMPUTING | SPEAKING_HTTP,
    ),
    "lexshard status": (
        ("lexshard.serve_app.cli", "lexshard.serve_app.commands.status"),
        {*COMPUTING, *SPEAKING_HTTP, "ray", "numpy", "pydantic"},
    ),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_nothing_that_it_has_no_part_of(process: str) -> None:
    modules, absent = PROCESSES[process]
    look = f"import sys, {', '.join(modules)}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_status_of_a_server_that_is_not_there_is_told_without_any_of_it() -> None:
    """The command itself, to its end: what is imported on the way counts, too."""
    _, absent = PROCESSES["lexshard status"]
    look = (
        "import sys; from lexshard.serve_app.cli import main; "
        "assert main(['status', '--url', 'http://127.0.0.1:1']) == 1; "
        f"print(sorted({absent!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert done.stderr == "lexshard: no server answers at http://127.0.0.1:1: connection refused\n"


@pytest.mark.slow
def test_a_tokenizer_is_read_without_torch_and_also_where_transformers_has_found_one(
    tmp_path: Path,
) -> None:
    folder = str(model_folder(tmp_path))
    look = (
        "from lexshard.serve_app.openai.tokenization import ModelTokenizer; "
        f"print(ModelTokenizer.load({folder!r}).encode('ab', False), 'torch' in sys.modules)"
    )
    for before, has_torch in (
        ("", False),
        ("from transformers.utils import is_torch_available; is_torch_available(); ", True),
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; {before}{look}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.strip() == f"[97, 98] {has_torch}", done.stdout + done.stderr


@pytest.mark.slow
def test_collections_of_garbage_leave_out_what_an_api_process_has_loaded(tmp_path: Path) -> None:
    """They stop every stream for as long as they take."""
    look = f"""if True:
        import asyncio, gc
        from lexshard.cluster.config import ServeConfig
        from lexshard.serve_app.api_processes import api_process
        from tests.support.mock_engine import MockEngine

        async def see(server):
            print(len(gc.get_objects()) < 10_000)

        async def run():
            api_process.HttpServer.serve = see
            order = api_process.ApiOrder("", {str(tmp_path)!r}, 0, "", 2, True, path="x")
            config = ServeConfig(model={str(model_folder(tmp_path))!r})
            await api_process.serve(order, config, lambda _: MockEngine())

        asyncio.run(run())
        """
    done = subprocess.run(
        [sys.executable, "-c", look],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        input="",
    )
    assert done.stdout.strip() == "True", done.stdout + done.stderr
