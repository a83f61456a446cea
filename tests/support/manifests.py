"""Objects of Kubernetes against schemas that refuse what they do not know.

A schema leaves names open: labels, annotations, resources, options of `ray start`. Those that our
manifests use are listed here, so that a misspelt one is found, too.
"""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from lexshard.cluster.config import OPTIONS
from lexshard.cluster.strict_yaml import StrictLoader
from tests.support.configurations import load_config
from tests.support.paths import ROOT

Manifest = dict[str, Any]

K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
SCHEMAS = ROOT / "tests" / "data" / "schemas"
LABELS = {
    "app.kubernetes.io/name",
    "app.kubernetes.io/component",
    "kubernetes.io/metadata.name",
    "pod-security.kubernetes.io/enforce",
    "pod-security.kubernetes.io/warn",
    "grafana_dashboard",
}
ANNOTATIONS = {
    "cert-manager.io/cluster-issuer",
    "nginx.ingress.kubernetes.io/proxy-buffering",
    "nginx.ingress.kubernetes.io/proxy-read-timeout",
    "nginx.ingress.kubernetes.io/proxy-body-size",
}
RESOURCES = {"cpu", "memory", "storage", "ephemeral-storage", "nvidia.com/gpu"}
FILES = {"dashboard.json", "alerts.yaml"}


def load(path: Path) -> list[Manifest]:
    with path.open(encoding="utf-8") as stream:
        return [each for each in yaml.load_all(stream, StrictLoader) if each]


def build(overlay: Path) -> list[Manifest]:
    """What kustomize makes of a folder; skips where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which builds the overlays, is not installed")
    told = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        raise ValueError(told.stderr)
    return [each for each in yaml.load_all(told.stdout, StrictLoader) if each]


def complaints(manifest: Manifest) -> Iterator[str]:
    """What is wrong with an object, the first thing first."""
    kind = str(manifest.get("kind"))
    schema = schemas().get((str(manifest.get("apiVersion")), kind))
    if schema is None:
        yield f"{manifest.get('apiVersion')} {kind} is no kind that is known here"
        return
    for error in schema.iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    if kind == "RayService":
        yield from _complaints_of_serving(manifest["spec"]["serveConfigV2"])


def _complaints_of_serving(text: str) -> Iterator[str]:
    try:
        content = yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        yield str(error)
        return
    for error in _serve_schema().iter_errors(content):
        yield f"serveConfigV2: {'.'.join(map(str, error.absolute_path))}: {error.message}"
    for application in content.get("applications", []):
        for deployment in application.get("deployments", []):
            # Ray's schema has any mapping here.
            scaling = deployment.get("autoscaling_config", {})
            for unknown in scaling.keys() - _scaling_options():
                yield f"serveConfigV2: autoscaling_config: {unknown} is unknown"
        if application.get("import_path") != "lexshard.serve_app.build:app":
            yield "serveConfigV2: import_path is not lexshard's"
        try:
            load_config(None, application.get("args", {}))
        except ValueError as error:
            yield f"serveConfigV2: args: {error}"


@cache
def schemas() -> dict[tuple[str, str], Draft202012Validator]:
    """By apiVersion and kind."""
    core = _read("kubernetes-1.34.json.gz")
    definitions = core["$defs"]
    found: dict[tuple[str, str], Manifest] = {}
    for kind, schema in core["kinds"].items():
        [version] = [each for each in schema["properties"]["apiVersion"]["enum"] if each]
        found[version, kind] = schema
    metadata = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    specs = {("ray.io/v1", "RayService"): _read("rayservice-1.7.json.gz")["properties"]["spec"]}
    for kind, spec in _read("prometheus-operator.json").items():
        specs["monitoring.coreos.com/v1", kind] = spec
    for (version, kind), spec in specs.items():
        found[version, kind] = {
            "type": "object",
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": {"const": version},
                "kind": {"const": kind},
                "metadata": metadata,
                "spec": spec,
            },
        }
    named = _strict(definitions)
    return {
        key: Draft202012Validator({"$defs": named, **_strict(schema)})
        for key, schema in found.items()
    }


@cache
def _serve_schema() -> Draft202012Validator:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_json_schema()
    return Draft202012Validator(_strict(schema))


@cache
def _scaling_options() -> frozenset[str]:
    from ray.serve.config import AutoscalingConfig

    return frozenset(AutoscalingConfig.model_fields)


def _read(name: str) -> Any:
    content = (SCHEMAS / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


@cache
def _start_options() -> frozenset[str]:
    from ray.scripts.scripts import start

    names = [name for each in start.params for name in each.opts]
    return frozenset(name.removeprefix("--") for name in names)


def _open_names(key: str) -> set[str] | frozenset[str] | None:
    """Which names may stand under ``key`` where its schema leaves them open."""
    if key in ("labels", "matchLabels", "selector"):
        return LABELS
    if key in ("requests", "limits"):
        return RESOURCES
    if key == "rayStartParams":
        return _start_options()
    known = {
        "annotations": ANNOTATIONS,
        "stringData": {option.variable for option in OPTIONS},
        "data": FILES,
    }
    return known.get(key)


def _strict(schema: Any, key: str = "") -> Any:
    """``schema`` without its open places. ``key`` is what it is the value of."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(inner) for name, inner in schema.items() if name != "properties"}
    if "properties" in schema:
        # An object's field may be called as a word of the schema is.
        inner = schema["properties"]
        strict["properties"] = {name: _strict(each, name) for name, each in inner.items()}
    if strict.pop("x-kubernetes-int-or-string", False):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    of_object = "object" in strict.get("type", ()) or "properties" in strict
    names = _open_names(key)
    others = strict.get("additionalProperties")
    if of_object and "properties" not in strict and names is not None:
        strict["propertyNames"] = {"enum": sorted(names)}
    elif "properties" in strict and (others is None or others is True):
        strict["additionalProperties"] = False
    return strict


def misspelt(manifest: Any) -> Iterator[tuple[str, Any]]:
    """``manifest`` with each of its keys misspelt in turn, and where."""
    for where in _keys(manifest):
        wrong = copy.deepcopy(manifest)
        holder = wrong
        for part in where[:-1]:
            holder = holder[part]
        key = where[-1]
        holder[key[:-1] + ("x" if key[-1] != "x" else "y")] = holder.pop(key)
        yield ".".join(map(str, where)), wrong


def _keys(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*where, key)
            yield from _keys(inner, (*where, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _keys(item, (*where, number))
