"""The page's own files, as they are in this folder, and what it may load: these and no other."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.server_state import ServerState

FOLDER = Path(__file__).parent
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, in no frame. What a model says is text to the page;
# were it ever taken for markup, it still could neither run nor load anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked about each time, and answered from the name of its content
}


@lru_cache
def content_of(name: str) -> tuple[bytes, str]:
    """A file of the page, and the name of its content.

    Raises:
        ApiError: 404 where there is none.
    """
    path = FOLDER / name
    if path not in FOLDER.iterdir() or path.suffix not in KINDS:
        raise ApiError(404, f"The page has no file {name}")
    content = path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _response(name: str, request: Request) -> Response:
    content, tag = content_of(name)
    headers = HEADERS | {"ETag": tag, "Content-Type": KINDS[Path(name).suffix]}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


async def page(_: ServerState, request: Request) -> Response:
    """``GET /``."""
    return _response(INDEX, request)


async def page_file(_: ServerState, request: Request) -> Response:
    """``GET /playground/{name}``. Raises `ApiError` 404 where there is no such file."""
    name: str = request.path_params["name"]
    if name == INDEX:
        raise ApiError(404, "The page itself is at /")
    return _response(name, request)
