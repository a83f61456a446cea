"""A server of replicas with scripted engines, which ``serve deploy`` would update: every line of
standard input brings ``args`` and ``num_replicas`` to deploy, and is answered with one when that is
done. The first line is the configuration of the server that stands before them."""

from __future__ import annotations

import json
import sys
from typing import Any

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.launch import running_server
from tests.support.scripted import connect


def app(args: dict[str, Any]) -> Any:
    """What ``import_path`` names."""
    from lexshard.serve_app.replica import bind_replicas

    return bind_replicas(ServeConfig.model_validate(args), connect)


def main() -> None:
    config = ServeConfig.model_validate_json(sys.stdin.readline(), strict=True)
    with running_server(config, connect):
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from lexshard.serve_app.deployment import APPLICATION_NAME, DEPLOYMENT_NAME

        print("deployed", flush=True)
        for line in sys.stdin:
            given = json.loads(line)
            application = {
                "name": APPLICATION_NAME,
                "route_prefix": "/",
                "import_path": "tests.support.rolling:app",
                "args": given["args"],
                "deployments": [{"name": DEPLOYMENT_NAME, "num_replicas": given["num_replicas"]}],
            }
            client: Any = _get_global_client()
            client.deploy_apps(ServeDeploySchema(applications=[application]), _blocking=True)
            print("deployed", flush=True)


if __name__ == "__main__":
    main()
