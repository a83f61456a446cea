"""What the page knows of the server beyond its replies, and how it ends processes for all to see.

Streams outlive an engine: the page has a button that shows it. A web page elsewhere must never
press it: such a request cannot be JSON from this very origin, and on loopback its host is another.
"""

from __future__ import annotations

import os
import platform
import signal
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from lexshard.actors.role import RunningRole
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import ApiError, bad_request, json_response
from lexshard.serve_app.openai.protocol import AtLeastOne, StrictModel, parse
from lexshard.serve_app.server_state import ServerState


class KillRequest(StrictModel):
    """``POST /playground/kill``: a process of one of the roles that ``/status`` names."""

    process_id: AtLeastOne


async def about(state: ServerState, _: Request) -> Response:
    """``GET /playground/about``: what the page needs before it asks for anything."""
    information = state.information()
    return json_response(
        {
            "models": list(state.config.model_names),
            "context": information.context,
            "vocabulary_size": information.vocabulary_size,
            "head_bytes": information.head_bytes,
            "default_sampling": information.default_sampling,
            "head": information.head,
            "drafts": information.drafts,
            "end_token_ids": list(information.eos_token_ids),
            "chats": state.tokenizer.chat_template is not None,
            "kills": state.config.lets_page_kill,
        }
    )


async def kill(call: HttpCall) -> Response:
    """Ends a process of the engine, as a fault would: SIGKILL.

    Raises:
        ApiError: 403 where it is not this server's page that asks, or the operator wants none of
            it; 404 for what is no process of the engine on this machine.
    """

    def read(body: Any) -> KillRequest:
        _refuse_others(call)
        return parse(KillRequest, body)

    asked = await call.read(read)
    roles = [role for role in await call.state.client.roles() if _is_here(role)]
    found = sorted(role.name for role in roles if role.place.process_id == asked.process_id)
    if not found or asked.process_id == os.getpid():
        raise ApiError(404, "No part of the engine on this machine has that process id")
    os.kill(asked.process_id, signal.SIGKILL)
    return json_response({"killed": asked.process_id, "roles": found})


def _is_here(role: RunningRole) -> bool:
    return role.place.host == platform.node() and role.name != "api"


def _refuse_others(call: HttpCall) -> None:
    headers, config = call.request.headers, call.state.config
    if not config.lets_page_kill:
        raise ApiError(403, "This server does not let its page kill processes (--playground-kills)")
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise bad_request("the body must be sent as application/json")
    host = headers.get("host", "")
    if urlsplit(headers.get("origin", "")).netloc != host or not host:
        raise ApiError(403, "Only this server's own page may do that: Origin is not its address")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise ApiError(403, "Only this server's own page may do that")
    # A name that a stranger's DNS says is this machine would be an origin of its own.
    if config.on_loopback and not _names_loopback(host):
        raise ApiError(403, "Only under a loopback address: Host is another")


def _names_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
