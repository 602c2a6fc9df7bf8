"""Reads the certificate and the clock of an API server, without the credentials of a token."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

from kubeproxy.api.cluster import Cluster
from kubeproxy.api.status import connection_reason
from kubeproxy.api.x509 import Validity, validities
from kubeproxy.errors import SourceError

_MOST: Final = 4096
_DATE: Final = re.compile(rb"\r\ndate:([^\r]*)\r\n", re.IGNORECASE)


class Greeting(NamedTuple):
    """The validity of the server's certificate, None for http; the seconds by which its clock is ahead, None for
    unknown.
    """

    certificate: Validity | None
    ahead: float | None


def greet(cluster: Cluster, patience: float) -> Greeting:
    """Ask a server that is reached without a proxy. Blocks for `patience` seconds at most at each step.

    Raises SourceError when it does not answer. Must not be called for a cluster whose client certificate comes from an
    exec plugin.
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
    answer = b""
    while b"\r\n\r\n" not in answer and len(answer) < _MOST and (piece := sock.recv(_MOST)):
        answer += piece
    date = _DATE.search(answer)
    try:
        return parsedate_to_datetime(date[1].decode("latin-1")).timestamp() - time.time() if date else None
    except ValueError:
        return None
