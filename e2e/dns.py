"""A substitute for cluster DNS: A, AAAA and CNAME records of Services, read from the API at each query (RFC 1035)."""

from __future__ import annotations

import contextlib
import ipaddress
import socketserver
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from e2e.api import Api, Json
from e2e.layout import DOMAIN, HUB_IPV4

A, CNAME, AAAA, ANY = 1, 5, 28, 255
_NXDOMAIN: Final = 3
_ANSWER: Final = 0x8580  # QR, AA, RD, RA


class Record(NamedTuple):
    """A resource record: its name, its type, and an address or a name."""

    name: str
    kind: int
    value: str

    def encode(self) -> bytes:
        """Return the record in the form of an answer section, with a TTL of one second."""
        data = _encode_name(self.value) if self.kind == CNAME else ipaddress.ip_address(self.value).packed
        return _encode_name(self.name) + struct.pack("!HHIH", self.kind, 1, 1, len(data)) + data


Resolver = Callable[[str], "list[Record] | None"]
"""A function that returns the records of a name, or None for a name that does not exist."""


def reply(query: bytes, resolve: Resolver) -> bytes:
    """Return the answer to a query with one question; b"" for anything else."""
    try:
        identity, flags, questions = struct.unpack_from("!HHH", query)
        name, end = _decode_name(query, 12)
        (kind,) = struct.unpack_from("!H", query, end)
    except (struct.error, IndexError, UnicodeDecodeError):
        return b""
    if flags & 0x8000 or questions != 1:
        return b""
    records = resolve(name.lower())
    fitting = [each for each in records or () if each.kind in (kind, CNAME) or kind == ANY]
    code = _NXDOMAIN if records is None else 0
    header = struct.pack("!HHHHHH", identity, _ANSWER | code, 1, len(fitting), 0, 0)
    return header + query[12 : end + 4] + b"".join(record.encode() for record in fitting)


def _decode_name(message: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 1


def _encode_name(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


class Services:
    """The records of Services, `NAME.NAMESPACE.svc.cluster.local`, and of pods below a headless Service."""

    def __init__(self, get: Callable[[str], Json]) -> None:
        self._get = get

    def resolve(self, name: str) -> list[Record] | None:
        """Return the records of a name; an ExternalName that names a Service is resolved further."""
        labels = name.removesuffix(f".svc.{DOMAIN}").split(".")
        if not name.endswith(f".svc.{DOMAIN}") or len(labels) < 2:
            return None
        try:
            service = self._get(f"/api/v1/namespaces/{labels[-1]}/services/{labels[-2]}")
        except OSError:
            return None
        target = service["spec"].get("externalName", "").rstrip(".").lower()
        if service["spec"].get("type") == "ExternalName":
            return [Record(name, CNAME, target), *(self.resolve(target) or ())]
        return [Record(name, _kind(address), address) for address in self._addresses(labels[-1], labels[-2], service)]

    def _addresses(self, namespace: str, name: str, service: Json) -> Iterable[str]:
        addresses: list[str] = service["spec"].get("clusterIPs") or []
        if addresses != ["None"]:
            return addresses
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        slices = self._get(f"{path}?labelSelector=kubernetes.io/service-name={name}")["items"]
        unready = service["spec"].get("publishNotReadyAddresses", False)
        return [
            address
            for each in slices
            for endpoint in each.get("endpoints") or ()
            if unready or endpoint.get("conditions", {}).get("ready", True)
            for address in endpoint["addresses"]
        ]


def _kind(address: str) -> int:
    return A if ipaddress.ip_address(address).version == 4 else AAAA


class _Server(socketserver.ThreadingUDPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, resolve: Resolver) -> None:
        self.resolve = resolve
        super().__init__((HUB_IPV4, 53), _Handler)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        query, sock = self.request
        if answer := reply(query, self.server.resolve):
            with contextlib.suppress(OSError):
                sock.sendto(answer, self.client_address)


def serve(folder: Path) -> None:
    """Answer UDP queries at the hub's address until the process ends."""
    with _Server(Services(Api(folder).get).resolve) as server:
        server.serve_forever()
