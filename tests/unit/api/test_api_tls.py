"""TLS to an API server, and the messages if no connection is possible."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from kubeproxy.api.cluster import Trust, connection_reason
from kubeproxy.api.http import HttpClient
from kubeproxy.api.status import ConnectionFailed, os_reason
from kubeproxy.errors import SourceError
from support.http_client import cluster_at, run
from support.scripted import TLS


def test_tls_is_verified():
    async def script(request, reply):
        await reply.answer(200, b"{}")

    def get(client, _):
        return client.request("GET", "/x")

    ca = (TLS / "ca.crt").read_bytes()
    assert run(script, get, ca_data=ca).body == b"{}"
    assert run(script, get, ca_file=str(TLS / "ca.crt"), server_name="kubernetes.default").body == b"{}"
    assert run(script, get, insecure=True).body == b"{}"


def reason(url, **trust):
    """Return the reason why a server cannot be reached, without its address."""

    async def main():
        client = HttpClient(cluster_at(url, **trust))
        with pytest.raises(ConnectionFailed) as caught:
            await client.request("GET", "/x")
        await client.close()
        return str(caught.value).partition(": ")[2]

    return asyncio.run(main())


def listening(use, tls=None):
    """Run `use(url)` while a server closes its only connection after the first bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def serve():
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                sock.settimeout(20)
                with tls.wrap_socket(sock, server_side=True) if tls else sock as spoken:
                    spoken.recv(10)
                    spoken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return use(f"https://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            thread.join()


@pytest.fixture
def own_certificate(tmp_path):
    """A server's TLS context, and the file of its certificate, which only clients with this file trust."""
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    wanted = ["-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(["openssl", "req", "-x509", *curve, *wanted], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


def test_a_refused_certificate_is_named_with_the_next_step(own_certificate):
    context, own = own_certificate
    other = str(TLS / "ca.crt")
    assert listening(lambda url: reason(url, ca_file=other), context) == (
        f"the server's certificate is not signed by {other}"
    )
    data = {"ca_data": Path(other).read_bytes(), "cluster_field": "/k: clusters[c].cluster"}
    assert listening(lambda url: reason(url, **data), context).endswith(
        "is not signed by /k: clusters[c].cluster.certificate-authority-data"
    )
    assert listening(reason, context).endswith(
        "is not signed by an authority of this system; set cluster.certificate-authority"
    )
    assert listening(lambda url: reason(url, ca_file=own, server_name="api.example"), context).startswith(
        "the server's certificate is not for api.example: "
    )
    expired = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired (_ssl.c:1006)")
    expired.verify_code = 10
    assert connection_reason(expired, cluster_at("https://x")).startswith("the server's certificate has expired")


def test_a_port_with_another_protocol_is_distinguished():
    assert listening(reason).startswith("the server at this address does not use TLS")

    async def alert(request, reply):
        await reply.raw(b"\x15\x03\x01\x00\x02\x02\x46")
        await reply.forever()

    with pytest.raises(SourceError, match=r"is no HTTP, but TLS: the server's URL must begin with https$"):
        run(alert, lambda client, _: client.request("GET", "/x"))


def test_plain_http_to_a_tls_port_that_closes_gets_a_question_about_the_scheme(own_certificate):
    def plain(url):
        return reason(url.replace("https", "http"))

    said = listening(plain, own_certificate[0])
    assert said.startswith("the connection was closed without an answer to HTTP")
    assert said.endswith("must the server's URL begin with https?")


def test_names_that_are_none_are_errors_as_any_other():
    assert reason("http://a..b:1") == "the name cannot be resolved: it is no host name"


def test_errors_have_system_texts_instead_of_pythons():
    assert os_reason(OSError("Multiple exceptions: [Errno 113] Connect call failed ('::1', 1)")) == "No route to host"
    assert os_reason(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")) == "connection refused"
    assert os_reason(TimeoutError(110, "x")) == "Connection timed out"
    assert os_reason(ssl.SSLError(1, "[SSL: X] some words (_ssl.c:1006)")) == "some words"


def test_certificates_of_clusters_need_no_key_identifiers(monkeypatch):
    """As in Go; Python requires these from 3.13 on."""
    usual = ssl.create_default_context

    def strict(**sources):
        context = usual(**sources)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    context = Trust(ca_file=str(TLS / "ca.crt")).context(None)
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_client_certificate_is_shown():
    shown = []

    async def script(request, reply):
        shown.append(reply.writer.get_extra_info("peercert"))
        await reply.answer(200, b"{}")

    run(
        script,
        lambda client, _: client.request("GET", "/x"),
        ca_file=str(TLS / "ca.crt"),
        certificate_data=(TLS / "client.crt").read_bytes(),
        key_data=(TLS / "client.key").read_bytes(),
    )
    assert dict(entry[0] for entry in shown[0]["subject"]) == {"commonName": "client"}


def test_rotated_certificates_are_used_for_the_next_connection(tmp_path):
    ca = tmp_path / "ca.crt"
    ca.write_bytes((TLS / "ca.crt").read_bytes())
    cluster = cluster_at("https://127.0.0.1:1", ca_file=str(ca))

    async def contexts():
        first = await cluster.tls_context()
        same = await cluster.tls_context()
        ca.write_bytes((TLS / "ca.crt").read_bytes() + b"\n")
        rotated = await cluster.tls_context()
        ca.write_bytes(b"half a cert")
        kept = await cluster.tls_context()
        return first is same, first is not rotated, rotated is kept, isinstance(rotated, ssl.SSLContext)

    assert all(asyncio.run(contexts()))


async def answer(reader, writer):
    """Answer one request, and close."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
    await writer.drain()
    writer.close()


def test_a_changed_file_of_authorities_counts_for_the_next_connection(tmp_path, own_certificate, caplog):
    context, own = own_certificate
    authorities, theirs = tmp_path / "ca.crt", Path(own).read_bytes()
    authorities.write_bytes((TLS / "ca.crt").read_bytes())

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(cluster_at(url, ca_file=str(authorities)))
        with pytest.raises(ConnectionFailed, match=r"not signed by .*ca\.crt"):
            await client.request("GET", "/x")
        authorities.write_bytes(theirs)
        found = [(await client.request("GET", "/x")).body]
        for broken in (b"half a certificate", b"half a certificate!", b""):
            authorities.write_bytes(broken)
            found += [(await client.request("GET", "/x")).body for _ in range(2)]
        authorities.unlink()
        found.append((await client.request("GET", "/x")).body)
        await client.close()
        server.close()
        await server.wait_closed()
        return found

    assert asyncio.run(main()) == [b"{}"] * 8
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[0] for line in lines] == [
        "Keeping the present TLS settings, because the new settings cannot be read"
    ] * len(lines)
    assert all(f"cluster.certificate-authority {authorities}: holds no usable certificates" in line for line in lines)
    assert 2 <= len(lines) <= 3  # once for each kind of mistake in the file, not for each request
