"""What Triton needs on the machine where it runs: it compiles, in C, what launches its kernels."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from lexshard.actors.body.errors import BuildToolsError


def check_launchers() -> None:
    """Has Triton compile the first of its own C code, or find it in its cache: without it no kernel
    starts, and that should be known before a model is read.

    Raises BuildToolsError that says what is missing.
    """
    import triton.runtime

    try:
        _ = triton.runtime.driver.active
    except Exception as error:
        raise BuildToolsError(f"no Triton kernel can start here: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        named = f" ({compiler}, which CC names, is none)" if compiler else ""
        return (
            f"Triton launches them by C code that it compiles, and there is no C compiler{named}: "
            "install gcc and libc6-dev"
        )
    headers = Path(sysconfig.get_paths(scheme="posix_prefix")["include"])
    if not (headers / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            "Triton launches them by C code that it compiles against Python.h, which is not in "
            f"{headers}: install the headers of this Python (python3-dev or python{version}-dev)"
        )
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return f"{said}: repair that, or use --device cpu"
