"""What `kubectl apply -k` would send is what Kubernetes and KubeRay know, to the last key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.manifests import K8S, OVERLAYS, build, complaints, load, misspelt

PLAIN = sorted([*(K8S / "base").glob("*.yaml"), *(K8S / "examples").glob("*.yaml")])
WHOLE = [path for path in PLAIN if path.name != "kustomization.yaml"]
MONITORING = K8S / "overlays" / "monitoring"


def _name(path: Path) -> str:
    return str(path.relative_to(K8S))


def _found(manifest: Any) -> str | None:
    return next(complaints(manifest), None)


@pytest.mark.parametrize("path", WHOLE, ids=_name)
def test_every_manifest_is_valid(path: Path) -> None:
    assert [_found(manifest) for manifest in load(path)] == [None] * len(load(path))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_builds_and_is_valid(overlay: str) -> None:
    manifests = build(K8S / "overlays" / overlay)
    assert {
        manifest["metadata"]["namespace"]
        for manifest in manifests
        if manifest["kind"] != "Namespace"
    } == {"lexshard"}
    assert [_found(manifest) for manifest in manifests] == [None] * len(manifests)


@pytest.mark.parametrize("path", WHOLE, ids=_name)
def test_a_misspelt_key_is_found_wherever_it_stands(path: Path) -> None:
    missed = [
        where
        for manifest in load(path)
        for where, wrong in misspelt(manifest)
        if _found(wrong) is None
    ]
    assert missed == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_misspelt_key_of_what_is_served_is_found(overlay: str) -> None:
    for manifest in build(K8S / "overlays" / overlay):
        if manifest["kind"] != "RayService":
            continue
        served = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        missed = []
        for where, wrong in misspelt(served):
            manifest["spec"]["serveConfigV2"] = yaml.safe_dump(wrong)
            if _found(manifest) is None:
                missed.append(where)
        assert missed == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_misspelt_key_of_an_overlay_is_found(overlay: str, tmp_path: Path) -> None:
    """In its kustomization and its patches, too: some are refused by kustomize."""
    copied = tmp_path / "k8s"
    shutil.copytree(K8S, copied)
    folder = copied / "overlays" / overlay
    missed = []
    for path in sorted(folder.glob("*.yaml")):
        if path.name == "alerts.yaml":  # data of a ConfigMap: the PrometheusRule says the same
            continue
        [text] = [path.read_text(encoding="utf-8")]
        contents: list[Any] = list(yaml.safe_load_all(text))
        for number, content in enumerate(contents):
            for where, wrong in misspelt(content):
                changed = [*contents[:number], wrong, *contents[number + 1 :]]
                path.write_text(yaml.safe_dump_all(changed), encoding="utf-8")
                try:
                    found = any(_found(manifest) for manifest in build(folder))
                except ValueError:
                    found = True
                if not found:
                    missed.append(f"{path.name}: {where}")
        path.write_text(text, encoding="utf-8")
    assert missed == []


def test_selectors_select_the_pods_there_are() -> None:
    manifests = [
        manifest for path in sorted((K8S / "base").glob("*.yaml")) for manifest in load(path)
    ]
    [service] = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    templates = [
        each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    pods = [template["metadata"]["labels"].items() for template in templates]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is not None:
            wanted = selector["matchLabels"].items()
            assert any(wanted <= pod for pod in pods), manifest["metadata"]["name"]


def test_no_pod_runs_as_root_or_may_become_it() -> None:
    for overlay in OVERLAYS:
        for manifest in build(K8S / "overlays" / overlay):
            if manifest["kind"] != "RayService":
                continue
            cluster = manifest["spec"]["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                spec = group["template"]["spec"]
                assert spec["securityContext"]["runAsNonRoot"]
                assert spec["securityContext"]["runAsUser"] > 0
                for container in spec["containers"]:
                    assert not container["securityContext"]["allowPrivilegeEscalation"]
                    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_rule_says_what_the_alerts_say() -> None:
    [rule] = load(MONITORING / "prometheus-rule.yaml")
    [alerts] = load(MONITORING / "alerts.yaml")
    assert rule["spec"]["groups"] == alerts["groups"], "copy groups of alerts.yaml into the rule"
    assert json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["title"]


def test_keys_are_in_no_overlay() -> None:
    for overlay in OVERLAYS:
        kinds = [manifest["kind"] for manifest in build(K8S / "overlays" / overlay)]
        assert "Secret" not in kinds
