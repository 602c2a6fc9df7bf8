"""A word with an API server without telling it who we are: is it there, how long does its certificate last, what time
is it there. And how long a service account's token lasts, which is not a server's to say.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from base64 import urlsafe_b64decode
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import msgspec

from kubeproxy.api.cluster import Cluster
from kubeproxy.api.reasons import connection_reason
from kubeproxy.api.x509 import Validity, validities
from kubeproxy.errors import SourceError

_MOST: int = 4096


class Greeting(NamedTuple):
    """For when the server's certificate is good, None for http, and how many seconds its clock is ahead of ours, None
    if it does not say.
    """

    certificate: Validity | None
    ahead: float | None


def greet(cluster: Cluster, patience: float) -> Greeting:
    """Ask a server that no proxy stands before. Blocks for `patience` seconds at most at each step.

    Raises SourceError when it does not answer. Must not be called where an exec plugin brings the client's certificate.
    """
    server = cluster.server
    context = asyncio.run(cluster.tls_context())
    try:
        with socket.create_connection((server.host, server.port), patience) as plain:
            if context is None:
                return Greeting(None, _ahead(plain, server.authority))
            with context.wrap_socket(plain, server_hostname=cluster.server_hostname) as sock:
                pem = ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"")
                return Greeting(next(iter(validities(pem.encode())), None), _ahead(sock, server.authority))
    except OSError as error:
        raise SourceError(f"{server.authority}: {connection_reason(error, cluster)}") from error


def _ahead(sock: socket.socket, host: str) -> float | None:
    """Return the seconds by which the Date header of any answer is ahead."""
    sock.sendall(f"HEAD /livez HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    said = b""
    while b"\r\n\r\n" not in said and len(said) < _MOST and (piece := sock.recv(_MOST)):
        said += piece
    for line in said.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "date":
            try:
                return parsedate_to_datetime(value.strip()).timestamp() - time.time()
            except ValueError:
                return None
    return None


class _Claims(msgspec.Struct):
    exp: float
    iat: float = 0.0


def token_validity(token: str) -> Validity | None:
    """Return for when a token is good, None for one that does not say: RFC 7519, 4.1."""
    parts = token.strip().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)), type=_Claims)
    except ValueError:
        return None
    return Validity(claims.iat, claims.exp)
