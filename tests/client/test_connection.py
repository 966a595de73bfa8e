"""``Planner.connect`` over TLS: a server whose certificate nobody signed hears nothing, however https is spelled."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from service_support import live

from edge_dflash import Planner
from edge_dflash.client.connection import parse_url
from edge_dflash.errors import ServiceError

KEY = "k" * 24
SPELLINGS = ("https", "HTTPS", "Https", "httpS", " HTTPS", "HT\tTPS")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")


class Listed(BaseHTTPRequestHandler):
    """Lists one model, and notes the headers of whoever asks."""

    def do_GET(self):
        self.server.heard.append(dict(self.headers))
        body = json.dumps(
            {"data": [{"id": "big", "object": "model", "owned_by": "edge-dflash", "edge_dflash": {}}]}
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *parts):
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that it signed itself, its key in the same file."""
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", *made, *names, "-keyout", f"{path}.key", "-out", path)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with path.open("a") as file:
        file.write(path.with_suffix(".pem.key").read_text())
    return path


@pytest.fixture
def server(certificate):
    """A server over TLS: a handshake that fails ends in its accept, and is no request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with HTTPServer(("127.0.0.1", 0), Listed) as server:
        server.heard = []
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@needs_openssl
@pytest.mark.parametrize("scheme", SPELLINGS)
def test_a_certificate_that_nobody_signed_ends_the_connection(server, scheme):
    url = f"{scheme}://127.0.0.1:{server.server_port}"
    with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
        Planner.connect(url, api_key=KEY)
    assert server.heard == []


@needs_openssl
@pytest.mark.parametrize("scheme", SPELLINGS)
def test_one_that_is_trusted_does_not(server, certificate, monkeypatch, scheme):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    Planner.connect(f"{scheme}://127.0.0.1:{server.server_port}/v1", api_key=KEY).close()
    assert {headers["authorization"] for headers in server.heard} == {f"Bearer {KEY}"}


@pytest.mark.parametrize("scheme", SPELLINGS)
def test_a_spelling_is_none_of_the_address(scheme):
    assert parse_url(f"{scheme}://host:1/api/v1/") == (None, "https://host:1/api")


@pytest.mark.parametrize(("scheme", "tcp"), [("http", True), ("HTTP", True), ("unix", False), ("http+unix", False)])
def test_what_has_no_certificates_reads_none(service, tmp_path, monkeypatch, scheme, tcp):
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", None)
    with live(service, tmp_path, KEY, tcp=tcp) as url:
        rest = url.split(":", 1)[1]
        address = f"{scheme}:{rest}" if scheme != "http+unix" else f"{scheme}://{rest.replace('/', '%2F')}"
        with Planner.connect(address, api_key=KEY if tcp else None) as remote:
            assert remote.plan("go to the hall", max_new_tokens=2).finish_reason == "length"
