"""An API process with a scripted engine; see `tests.support.scripted`."""

from __future__ import annotations

import sys

from lexshard.serve_app.api_processes.api_process import main
from tests.support.scripted import connect

if __name__ == "__main__":
    sys.exit(main(connect))
