"""What may stand in a file of `ray up`: Ray's own schema without its open places.

Ray passes on what it does not know: to the provider, to the cloud, into resources nobody asks for.
A misspelt key there costs a cluster that starts with less than it was told. What a cloud's API has
beyond ``NODE_CONFIG`` is refused, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

GPU_MEMORY_LABEL = "lexshard/gpu-memory"
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer", "minimum": 0}
_SWITCH: Schema = {"type": "boolean"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}


def _closed(keys: Schema, required: Iterable[str] = ()) -> Schema:
    return {
        "type": "object",
        "properties": keys,
        "required": list(required),
        "additionalProperties": False,
    }


def _list_of(keys: Schema) -> Schema:
    return {"type": "array", "items": _closed(keys)}


_NAMES: Schema = {"type": "object", "additionalProperties": _TEXT}

# By type of provider, as its node provider and its bootstrapping read them.
PROVIDERS: dict[str, Schema] = {
    "local": _closed(
        {
            "type": _TEXT,
            "head_ip": _TEXT,
            "worker_ips": _TEXTS,
            "external_head_ip": _TEXT,
            "use_internal_ips": _SWITCH,
            "disable_node_updaters": _SWITCH,
        },
        required=("type", "head_ip", "worker_ips"),
    ),
    "aws": _closed(
        {
            "type": _TEXT,
            "region": _TEXT,
            "availability_zone": _TEXT,
            "cache_stopped_nodes": _SWITCH,
            "use_internal_ips": _SWITCH,
            "disable_node_updaters": _SWITCH,
            "security_group": _closed({"GroupName": _TEXT, "IpPermissions": {"type": "array"}}),
        },
        required=("type", "region"),
    ),
    "gcp": _closed(
        {
            "type": _TEXT,
            "region": _TEXT,
            "availability_zone": _TEXT,
            "project_id": _TEXT,
            "cache_stopped_nodes": _SWITCH,
            "use_internal_ips": _SWITCH,
            "disable_node_updaters": _SWITCH,
        },
        required=("type", "region", "availability_zone", "project_id"),
    ),
}

# Of one node: what goes to RunInstances (AWS) and instances.insert (GCP).
NODE_CONFIG: dict[str, Schema] = {
    "aws": _closed(
        {
            "InstanceType": _TEXT,
            "ImageId": _TEXT,
            "KeyName": _TEXT,
            "SubnetIds": _TEXTS,
            "SecurityGroupIds": _TEXTS,
            "EbsOptimized": _SWITCH,
            "UserData": _TEXT,
            "BlockDeviceMappings": _list_of(
                {
                    "DeviceName": _TEXT,
                    "Ebs": _closed(
                        {
                            "VolumeSize": _NUMBER,
                            "VolumeType": _TEXT,
                            "Iops": _NUMBER,
                            "Throughput": _NUMBER,
                            "Encrypted": _SWITCH,
                            "DeleteOnTermination": _SWITCH,
                        }
                    ),
                }
            ),
            "IamInstanceProfile": _closed({"Arn": _TEXT, "Name": _TEXT}),
            "InstanceMarketOptions": _closed(
                {"MarketType": _TEXT, "SpotOptions": _closed({"MaxPrice": _TEXT})}
            ),
            "MetadataOptions": _closed({"HttpTokens": _TEXT, "HttpPutResponseHopLimit": _NUMBER}),
            "Placement": _closed({"GroupName": _TEXT, "Tenancy": _TEXT}),
            "TagSpecifications": _list_of(
                {"ResourceType": _TEXT, "Tags": _list_of({"Key": _TEXT, "Value": _TEXT})}
            ),
        },
        required=("InstanceType", "ImageId"),
    ),
    "gcp": _closed(
        {
            "machineType": _TEXT,
            "disks": _list_of(
                {
                    "boot": _SWITCH,
                    "autoDelete": _SWITCH,
                    "type": _TEXT,
                    "initializeParams": _closed(
                        {"diskSizeGb": _NUMBER, "diskType": _TEXT, "sourceImage": _TEXT}
                    ),
                }
            ),
            "guestAccelerators": _list_of({"acceleratorType": _TEXT, "acceleratorCount": _NUMBER}),
            "scheduling": _closed(
                {
                    "onHostMaintenance": _TEXT,
                    "automaticRestart": _SWITCH,
                    "preemptible": _SWITCH,
                    "provisioningModel": _TEXT,
                }
            ),
            "networkInterfaces": _list_of(
                {"kind": _TEXT, "network": _TEXT, "subnetwork": _TEXT, "accessConfigs": {}}
            ),
            "serviceAccounts": _list_of({"email": _TEXT, "scopes": _TEXTS}),
            "metadata": _closed({"items": _list_of({"key": _TEXT, "value": _TEXT})}),
            "labels": _NAMES,
            "tags": _closed({"items": _TEXTS}),
        },
        required=("machineType", "disks"),
    ),
}

# What processes of lexshard ask for, and Ray's own; memory in bytes.
RESOURCES: Schema = _closed(
    {"CPU": _NUMBER, "GPU": _NUMBER, "memory": _NUMBER, "object_store_memory": _NUMBER},
    required=("CPU",),
)


def strict_schema(provider: str) -> Schema:
    """Ray's JSON schema (draft 7) of a file of `ray up`, closed for ``provider``, one of
    ``PROVIDERS``."""
    import ray.autoscaler

    path = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    schema: Schema = json.loads(path.read_text(encoding="utf-8"))
    keys = schema["properties"]
    keys["provider"] = PROVIDERS[provider]
    keys["file_mounts"] = _NAMES  # paths
    if provider == "local":  # `ray up` knows no types of nodes that it does not start
        for key in ("available_node_types", "head_node_type", "docker"):
            keys.pop(key)
        keys["min_workers"] = _NUMBER
        return schema
    # By the names that their authors give them.
    [node_type] = keys["available_node_types"].pop("patternProperties").values()
    keys["available_node_types"]["additionalProperties"] = node_type
    node_type["properties"]["resources"] = RESOURCES
    node_type["properties"]["node_config"] = NODE_CONFIG[provider]
    node_type["properties"]["labels"] = _closed({GPU_MEMORY_LABEL: _TEXT})
    return schema
