"""What ``GET /status`` tells: who does what, on which process, and how busy all are."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from serve_app.server_state import VERSION, ServerState


async def status_report(state: ServerState) -> dict[str, Any]:
    """Roles of the engine that answers at this moment, this API process and the counters."""
    client = state.client
    statistics = asdict(client.statistics)
    return {
        "version": VERSION,
        "model": state.config.model_names[0],
        "ready": client.ready,
        "reason": client.health_reason,
        "engine_restarts": client.restarts,
        "roles": [
            {
                "role": "api",
                "index": 0,
                "host": platform.node(),
                "process_id": os.getpid(),
                "device": "cpu",
                "detail": f"one of {state.config.api_processes}, the one that answers",
            },
            *(
                {
                    "role": role.name,
                    "index": role.index,
                    "host": role.place.host,
                    "process_id": role.place.process_id,
                    "device": role.device,
                    "detail": role.detail,
                }
                for role in await client.roles()
            ),
        ],
        "counters": statistics,
    }
