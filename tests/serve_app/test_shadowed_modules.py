"""A user's file in the folder where a server is started is no module of the server's processes."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.embedded import INGRESS, EmbeddedServer, ServerModules
from tests.support.paths import ROOT


def test_a_process_takes_no_module_from_the_folder_where_the_server_is_started(
    tmp_path: Path,
) -> None:
    """Told nothing, it gets as far as to its order."""
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    with ExitStack() as ends:
        server = EmbeddedServer(ServeConfig(model="m"), ServerModules())
        roles = server._make_roles(tmp_path, ends)
    for role in roles:
        if role.name != INGRESS:  # which would become HAProxy
            done = subprocess.run(role.command, cwd=tmp_path, input=b"", capture_output=True)
            assert b"msgspec.DecodeError" in done.stderr, done.stderr.decode()


def test_every_module_is_started_so() -> None:
    plain = re.compile(r'sys\.executable,\s*"-m"')
    files = [
        path
        for layer in ("actors", "cluster", "serve_app")
        for path in (ROOT / layer).rglob("*.py")
    ]
    assert [path for path in files if plain.search(path.read_text(encoding="utf-8"))] == []
