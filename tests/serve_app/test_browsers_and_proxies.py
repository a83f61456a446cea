"""Who may ask from a browser, under which path, and with which certificate."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import ConfigError
from lexshard.cluster.ingress import fit_for_clients, ingress_environment
from lexshard.serve_app.start.banner import base_url
from lexshard.serve_app.start.preflight import certificate_with_key, check_certificate
from lexshard.serve_app.start.readiness import StartupError
from tests.support.configurations import load_config
from tests.support.exposition import unlabelled
from tests.support.mock_server import Client, serve

PAGE = "https://app.example"


def test_no_page_of_a_browser_may_read_unless_told() -> None:
    async def check(client: Client) -> None:
        reply = await client.get("/v1/models", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        assert (await client.options("/v1/completions", headers=asked)).status_code == 405

    serve(check)


def test_pages_of_named_origins_may_ask_and_keys_are_asked_for_as_ever() -> None:
    async def check(client: Client) -> None:
        asked = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        allowed = await client.options("/v1/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        other = await client.options("/v1/completions", headers=asked | {"origin": "https://b"})
        assert other.status_code == 400
        reply = await client.get("/v1/models", headers={"origin": PAGE})
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()

    serve(check, cors_origins=[PAGE], api_keys=["key"])


@pytest.mark.parametrize("wrong", ["app.example", "https://app.example/path", ""])
def test_an_origin_is_scheme_and_host(wrong: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, {"model": "a", "cors_origins": [wrong]})


def test_a_path_of_its_own_is_answered_with_and_without_it_and_counted_without() -> None:
    async def check(client: Client) -> None:
        for path in ("/llm/v1/models", "/v1/models", "/llm/v1/models/mock"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/llm2/v1/models")).status_code == 404
        lines = unlabelled((await client.get("/llm/metrics")).text).splitlines()
        counted = 'lexshard_http_requests_total{method="GET",path="/v1/models",status="200"}'
        assert f"{counted} 2.0" in lines

    serve(check, root_path="/llm")
    for wrong in ("llm", "/", "/llm/"):
        with pytest.raises(ConfigError):
            load_config(None, {"model": "a", "root_path": wrong})


def own_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(key)]
    try:
        subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here, which makes the certificate")
    return certificate, key


def test_haproxy_gets_certificate_and_key_in_a_file_of_the_servers_own(tmp_path: Path) -> None:
    certificate, key = own_certificate(tmp_path)
    files: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    config = ServeConfig(model="a", **files)
    check_certificate(config)
    assert base_url(config) == "https://127.0.0.1:8000"
    content = certificate_with_key(config)
    environment = ingress_environment("haproxy", tmp_path, "127.0.0.1", 8443, certificate=content)
    together = tmp_path / "certificate.pem"
    assert together.stat().st_mode & 0o077 == 0
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(together)
    serves = (
        "frontend http_frontend\n    bind *:1\nfrontend prometheus\nlisten stats\n"
        "backend default_backend\n"
    )
    written = fit_for_clients(serves, tmp_path, environment["LEXSHARD_INGRESS_LISTEN"])
    assert f"bind 127.0.0.1:8443 ssl crt {together} " in written


def test_a_certificate_without_its_key_is_told_before_anything_starts(tmp_path: Path) -> None:
    certificate, key = own_certificate(tmp_path)
    for files in (
        {"ssl_certfile": str(certificate)},
        {"ssl_keyfile": str(key)},
        {"ssl_certfile": str(tmp_path / "none"), "ssl_keyfile": str(key)},
    ):
        values: dict[str, Any] = files
        with pytest.raises(StartupError, match=r"ssl|certificate"):
            check_certificate(ServeConfig(model="a", **values))
