"""The targets by name, each with words of its input format, which generate inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec import Struct, structs

from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.model import objects
from support.fuzz import from_api, from_files, from_kernel
from support.fuzz.judge import Target
from support.places import RECORDINGS

CORPUS: Final = RECORDINGS / "fuzz"
"""A folder for each target: initial inputs, and every input that failed once."""


class Entry(NamedTuple):
    """A target, the maximum length of its inputs in bytes, and words of its format."""

    read: Target
    longest: int = 4096
    words: tuple[str, ...] = ()


def _fields(*kinds: type) -> tuple[str, ...]:
    return tuple(f'"{field.encode_name}":' for kind in kinds for field in structs.fields(kind))


_OBJECTS: Final = _fields(
    *(kind for kind in vars(objects).values() if isinstance(kind, type) and Struct in kind.__mro__[1:])
)
_VALUES: Final = (
    "null", "true", "[]", "{}", "-1", "65535", "1e9", '"TCP"', '"UDP"', '"Local"', '"ClientIP"', '"LoadBalancer"',
    '"NodePort"', '"10.96.0.1"', '"fd00::1"', '"IPv4"', '"IPv6"', '"10.0.0.0/8"', '"a=0,b=50"',
    '"\\\\ud800"', '"\\\\u0000"',
)  # fmt: skip
_HTTP: Final = (
    "HTTP/1.1", "Content-Length: ", "Transfer-Encoding: chunked", "\\x0d\\x0a", "Connection: close", "Upgrade: h2c",
    "GET ", "POST ", "CONNECT ", "Host: [::1]:80", "Expect: 100-continue", "?address=", "limit=", "%00",
)  # fmt: skip
_KUBECONFIG: Final = (
    "current-context: ", "contexts:", "clusters:", "users:", "server: ", "exec:", "apiVersion: ", "command: ",
    "token: ", "tokenFile: ", "proxy-url: ", "client-key-data: ", "as-user-extra: ", "certificate-authority: ",
    "tls-server-name: ",
    "provideClusterInfo: true", "extensions:", "&a ", "*a", "\\\\0", "https://", "http://[", "username: ", "as: ",
)  # fmt: skip

TARGETS: Final[dict[str, Entry]] = {
    "lists": Entry(from_api.lists, words=_OBJECTS + _VALUES),
    "watches": Entry(from_api.watches, words=(*_OBJECTS, *_VALUES, '"type":"ADDED","object":', '"BOOKMARK"', "\\x0a")),
    "cluster": Entry(from_api.cluster, words=(*_OBJECTS, *_VALUES, "\\x0aS", "\\x0aE", "\\x0aN", "\\x0as")),
    "manifests": Entry(from_api.manifests, words=(*_VALUES, "---\\x0a", "&a ", "*a", "kind: Service", "!!binary ")),
    "statuses": Entry(
        from_api.statuses, words=('"retryAfterSeconds":', '"causes":', '"code":', '"status":', '"token":')
    ),
    "answers": Entry(from_api.answers, words=_HTTP),
    "certificates": Entry(from_api.certificates),
    "requests": Entry(from_files.requests, 20000, _HTTP),
    "replies": Entry(from_files.replies, words=(*_VALUES, "S{", '"schemaVersion": 1', '"severity": "broken"')),
    "kubeconfig": Entry(from_files.kubeconfig, words=_KUBECONFIG),
    "configuration": Entry(
        from_files.configuration,
        words=tuple(f"{field.encode_name}: " for field in structs.fields(KubeProxyConfiguration)),
    ),
    "flags": Entry(from_files.flags, words=("--", "=", "--v", "--config", "--nodeport-addresses", "\\x00")),
    "nf_tables": Entry(from_kernel.nf_tables),
    "nf_tables_announced": Entry(from_kernel.nf_tables_announced),
    "connections": Entry(from_kernel.connections),
    "routes": Entry(from_kernel.routes),
    "ipvs": Entry(from_kernel.ipvs),
    "ipset": Entry(from_kernel.ipset),
    "iptables_save": Entry(
        from_kernel.iptables_save, words=("*nat", "-A KUBE-", "-j ", "--comment ", "COMMIT", ":KUBE-")
    ),
    "proc": Entry(from_kernel.proc, 2048, (": 0100007F:0050 ", " 0A ", "Max open files ", "kube-proxy\\x00")),
}


def inputs(name: str) -> Iterable[bytes]:
    """Yield the stored inputs of a target."""
    for path in sorted((CORPUS / name).iterdir()):
        yield path.read_bytes()
