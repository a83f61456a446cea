"""What `kubectl apply -k` would send is what Kubernetes and KubeRay know, to the last key."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address, ip_network
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
def test_a_misspelt_key_of_an_overlay_is_found(overlay: str) -> None:
    """Also in what is served, which is a text there."""
    for manifest in build(K8S / "overlays" / overlay):
        missed = [where for where, wrong in misspelt(manifest) if _found(wrong) is None]
        if manifest["kind"] == "RayService":
            served = yaml.safe_load(manifest["spec"]["serveConfigV2"])
            for where, wrong in misspelt(served):
                manifest["spec"]["serveConfigV2"] = yaml.safe_dump(wrong)
                if _found(manifest) is None:
                    missed.append(where)
        assert missed == []


def test_selectors_select_the_pods_there_are() -> None:
    pods = [template["metadata"]["labels"].items() for template in groups_of(base())]
    for manifest in base():
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is not None:
            wanted = selector["matchLabels"].items()
            assert any(wanted <= pod for pod in pods), manifest["metadata"]["name"]


def groups_of(manifests: list[Any]) -> list[Any]:
    """The templates of all pods of a RayService, the head's first."""
    [service] = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def base() -> list[Any]:
    return [manifest for path in sorted((K8S / "base").glob("*.yaml")) for manifest in load(path)]


def test_each_replica_is_stored_once() -> None:
    """Whoever is asked for /metrics tells of all: one pod of a cluster is asked."""
    [monitor] = load(MONITORING / "pod-monitor.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    head, *workers = groups_of(base())
    assert wanted <= head["metadata"]["labels"].items()
    assert not any(wanted <= worker["metadata"]["labels"].items() for worker in workers)
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert ports[endpoint["port"]] == 8000
    [service] = [each for each in base() if each["kind"] == "RayService"]
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert served["proxy_location"] == "EveryNode"  # the head's always, too


def test_a_pod_that_ends_has_the_time_that_its_streams_are_promised() -> None:
    for overlay in ("cpu-demo", "autoscaling", "gpu-shards"):
        for template in groups_of(build(K8S / "overlays" / overlay))[1:]:
            [container] = template["spec"]["containers"]
            [shell, option, script] = container["lifecycle"]["preStop"]["exec"]["command"]
            assert (shell, option) == ("/bin/sh", "-c")
            told = re.fullmatch(r"sleep (\d+); exec sh /opt/lexshard/leave\.sh (\d+)", script)
            assert told is not None
            asking = 20  # for Ray to hear of it, at most
            whole = sum(map(int, told.groups())) + asking
            assert whole < template["spec"]["terminationGracePeriodSeconds"]


def test_rays_object_store_has_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray's own rule; else it is on a disk. Where no volume is mounted there the operator makes
    one as large as the container's memory."""
    from ray._private import utils

    for overlay in ("cpu-demo", "autoscaling", "gpu-shards"):
        for template in groups_of(build(K8S / "overlays" / overlay)):
            container, *_ = template["spec"]["containers"]
            volumes = {each["name"]: each for each in template["spec"].get("volumes", ())}
            mounted = {each["mountPath"]: each for each in container.get("volumeMounts", ())}
            memory = container["resources"]["limits"]["memory"]
            shared = mounted.get("/dev/shm")
            size = memory if shared is None else volumes[shared["name"]]["emptyDir"]["sizeLimit"]
            room, has = (int(each.removesuffix("Gi")) * 2**30 for each in (size, memory))
            monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda room=room: room)
            assert utils.resolve_object_store_memory(has) <= room, overlay


def allowed(direction: str, pod: dict[str, str], peer: str | dict[str, str], port: int) -> bool:
    """Whether the policies let ``pod`` hear (``ingress``) or ask (``egress``) a peer at a ``port``:
    an address that is no pod's, or labels of a pod, its namespace's as ``ns:NAME``."""
    kind = direction.capitalize()
    policies = [each["spec"] for each in base() if each["kind"] == "NetworkPolicy"]
    mine = [each for each in policies if each["podSelector"]["matchLabels"].items() <= pod.items()]
    assert any(kind in each["policyTypes"] for each in mine), "all is allowed"
    peers = "from" if direction == "ingress" else "to"
    for rule in (rule for each in mine for rule in each.get(direction, ())):
        ports = rule.get("ports")
        if ports is not None and port not in [each["port"] for each in ports]:
            continue
        if peers not in rule or any(selects(each, peer) for each in rule[peers]):
            return True
    return False


def selects(chosen: dict[str, Any], peer: str | dict[str, str]) -> bool:
    if isinstance(peer, str):
        block = chosen.get("ipBlock")
        return block is not None and ip_address(peer) in ip_network(block["cidr"])
    if "ipBlock" in chosen:
        return False
    pod = chosen.get("podSelector", {}).get("matchLabels", {})
    if "namespaceSelector" not in chosen:
        return peer["ns:kubernetes.io/metadata.name"] == "lexshard" and pod.items() <= peer.items()
    namespace = chosen["namespaceSelector"].get("matchLabels", {}).items()
    return {f"ns:{name}": value for name, value in namespace}.items() | pod.items() <= peer.items()


WORKER = {"app.kubernetes.io/name": "lexshard", "app.kubernetes.io/component": "worker"}
HEAD = {"app.kubernetes.io/name": "lexshard", "app.kubernetes.io/component": "head"}
STRANGER = {"app.kubernetes.io/name": "web", "ns:kubernetes.io/metadata.name": "shop"}
OPERATOR = {
    "app.kubernetes.io/name": "kuberay-operator",
    "ns:kubernetes.io/metadata.name": "kuberay",
}
OWN = WORKER | {"ns:kubernetes.io/metadata.name": "lexshard"}
OUTSIDE = "203.0.113.7"  # behind a LoadBalancer or a NodePort; an ingress has its node's


@pytest.mark.parametrize(
    ("direction", "pod", "peer", "port", "expected"),
    [
        ("ingress", WORKER, STRANGER, 8000, True),
        ("ingress", WORKER, OUTSIDE, 8000, True),
        ("ingress", WORKER, OWN, 10001, True),
        ("ingress", WORKER, STRANGER, 10001, False),
        ("ingress", WORKER, OUTSIDE, 10001, False),
        ("ingress", HEAD, OPERATOR, 8265, True),
        ("ingress", HEAD, STRANGER, 8265, False),
        ("ingress", HEAD, OUTSIDE, 6379, False),
        ("egress", WORKER, OWN, 6379, True),
        ("egress", WORKER, {"ns:kubernetes.io/metadata.name": "kube-system"}, 53, True),
        ("egress", WORKER, "169.254.20.10", 53, True),
        ("egress", WORKER, OUTSIDE, 443, False),
        ("egress", WORKER, STRANGER, 5432, False),
    ],
)
def test_clients_come_from_anywhere_and_nobody_else_comes_in(
    direction: str, pod: dict[str, str], peer: str | dict[str, str], port: int, expected: bool
) -> None:
    """An ingress in the host's network, a LoadBalancer and NodeLocal DNSCache are no pods."""
    assert allowed(direction, pod, peer, port) is expected


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


def test_a_server_that_is_not_looked_at_any_more_is_down() -> None:
    """A pod that is gone has no ``up``, which then is not 0."""
    [alerts] = load(MONITORING / "alerts.yaml")
    [down] = [each for each in alerts["groups"][0]["rules"] if each["alert"] == "LexshardDown"]
    looked_at = down["expr"].partition(" == 0")[0]
    assert down["expr"] == f"{looked_at} == 0 or absent({looked_at})"


def test_keys_are_in_no_overlay() -> None:
    for overlay in OVERLAYS:
        kinds = [manifest["kind"] for manifest in build(K8S / "overlays" / overlay)]
        assert "Secret" not in kinds
