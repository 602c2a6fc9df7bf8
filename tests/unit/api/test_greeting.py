"""The answer of an API server to an anonymous request: its certificate and its time. The expiry of a token."""

from __future__ import annotations

import ssl
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from socket import create_server

import msgspec
import pytest

from kubeproxy.api.cluster import token_validity, validities
from kubeproxy.api.lists import greet
from kubeproxy.errors import SourceError
from support.http_client import cluster_at
from support.scripted import TLS


@contextmanager
def answering(said: bytes, tls: ssl.SSLContext | None = None, delay: float = 0.0) -> Iterator[int]:
    """The port of a server that sends fixed bytes to its only client, whatever the request is."""
    with create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def serve() -> None:
            plain, _ = listener.accept()
            with suppress(OSError), tls.wrap_socket(plain, server_side=True) if tls else plain as sock:
                sock.recv(4096)
                time.sleep(delay)
                sock.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def dated(ahead: float) -> bytes:
    return f"HTTP/1.1 401 Unauthorized\r\nDate: {formatdate(time.time() + ahead, usegmt=True)}\r\n\r\n".encode()


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -90.0])
def test_the_clock_is_compared_whatever_the_answer(ahead):
    with answering(dated(ahead)) as port:
        greeting = greet(cluster_at(f"http://127.0.0.1:{port}"), 5.0)
    assert greeting.certificate is None
    assert greeting.ahead == pytest.approx(ahead, abs=30)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nDate: soon\r\n\r\n"])
def test_a_server_that_does_not_say_its_time(said):
    with answering(said) as port:
        assert greet(cluster_at(f"http://127.0.0.1:{port}"), 5.0).ahead is None


def test_a_certificate_is_read():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(TLS / "server.crt", TLS / "server.key")
    with answering(dated(0), tls) as port:
        greeting = greet(cluster_at(f"https://127.0.0.1:{port}", ca_data=(TLS / "ca.crt").read_bytes()), 5.0)
    assert [greeting.certificate] == validities((TLS / "server.crt").read_bytes())[:1]


def test_no_proxy_answers():
    with create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(SourceError, match=f"127.0.0.1:{port}: "):
        greet(cluster_at(f"http://127.0.0.1:{port}"), 5.0)


def test_a_silent_server_is_distinguished_from_a_missing_one():
    for scheme in ("http", "https"):
        with create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
            place = f"127.0.0.1:{silent.getsockname()[1]}"
            cluster = cluster_at(f"{scheme}://{place}", ca_data=(TLS / "ca.crt").read_bytes())
            with pytest.raises(SourceError, match=f"^{place}: sent nothing for 0 s$"):
                greet(cluster, 0.1)


def test_the_time_until_a_late_answer_is_measured():
    with answering(dated(0), delay=0.2) as port:
        assert greet(cluster_at(f"http://127.0.0.1:{port}"), 5.0).seconds >= 0.2


def token(claims: object) -> str:
    return ".".join(("e30", urlsafe_b64encode(msgspec.json.encode(claims)).decode().rstrip("="), "signature"))


def test_tokens():
    assert token_validity(token({"iat": 100, "exp": 3700, "sub": "me"}) + "\n") == (100.0, 3700.0)
    assert token_validity(token({"exp": 3700})) == (0.0, 3700.0)
    for other in (token({"sub": "me"}), token([]), "opaque", "a.b.c", "a.!.c", ""):
        assert token_validity(other) is None
