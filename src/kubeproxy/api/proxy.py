"""The HTTP proxy in front of the API server, and the tunnel through it. No message and no repr contains the proxy's
password. The kubeconfig's proxy-url selects the proxy. If the kubeconfig has no proxy-url, the environment variables
HTTPS_PROXY, HTTP_PROXY and NO_PROXY select the proxy, as in Go's net/http and golang.org/x/net/http/httpproxy."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from kubeproxy.api.cluster import Cluster, Proxy, Server
from kubeproxy.api.connection import ApiConnection
from kubeproxy.api.status import ConnectionFailed, os_reason
from kubeproxy.errors import ConfigError, Unsupported
from kubeproxy.model.addresses import is_loopback, pack, parse_cidr, split_host_port, within

log = logging.getLogger("kubeproxy.api")

_PORTS = {"http": 80, "https": 443}
_MOST_HEADERS = 1000
_CLOSED = "the proxy closed the connection"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r\n")

Variables = Mapping[str, str]


def proxy_of(server: Server, proxy_url: str, field: str, environ: Variables) -> Proxy | None:
    """Return the HTTP proxy for a server: the proxy at `proxy_url`, which is the value of `field` in the kubeconfig; if
    `proxy_url` is empty, the proxy that the environment variables select. Raises ConfigError for an invalid field, and
    Unsupported for schemes other than http and https."""
    if proxy_url:
        return _supported(_parse(proxy_url, field), field, server)
    names = (f"{server.scheme}_proxy".upper(), f"{server.scheme}_proxy")
    name = next((name for name in names if environ.get(name)), None)
    if name is None or bypassed(server.host, server.port, environ.get("NO_PROXY") or environ.get("no_proxy") or ""):
        return None
    text = environ[name]
    try:
        parts = _parse(text if "://" in text else f"http://{text}", name)
    except ConfigError as error:  # not an error, as in Go: other programs share the environment
        log.warning("Continuing without a proxy: %s", error)
        return None
    return _supported(parts, name, server)


def _parse(text: str, field: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        usable = parts.hostname and (parts.port is None or parts.port > 0) and text.isascii() and text.isprintable()
    except ValueError:  # the error's text may quote a password
        usable = False
    if not usable or " " in text:
        raise ConfigError(f"{field}: is no URL of a proxy; give one such as http://10.0.0.1:3128")
    return parts


def _supported(parts: SplitResult, field: str, server: Server) -> Proxy:
    if parts.scheme not in _PORTS:
        raise Unsupported(
            f"{field}: proxies of the kind {parts.scheme!r} are not supported; give an http or https proxy, or exempt"
            f" the API server {server.authority} with NO_PROXY"
        )
    if parts.scheme == "https" and server.scheme != "https":
        raise Unsupported(f"{field}: an https proxy is only supported for an https API server; give an http proxy")
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme], authorization)


def bypassed(host: str, port: int, no_proxy: str) -> bool:
    """Return whether a server is reached directly: it is on loopback, or matches NO_PROXY. NO_PROXY lists addresses,
    networks and domains, or * for everything. The entry example.com includes its subdomains; .example.com and
    *.example.com match only the subdomains. All entries except networks may have a port."""
    host = host.lower()
    address = pack(host)
    if host == "localhost" or (address is not None and is_loopback(address)):
        return True
    for entry in filter(None, (part.strip().lower() for part in no_proxy.split(","))):
        if entry == "*":
            return True
        network = parse_cidr(entry)
        if network is not None:
            if address is not None and within(address, (network,)):
                return True
            continue
        name, wanted = split_host_port(entry) or (entry, "")
        if wanted and wanted != str(port):
            continue
        if address is not None and pack(name) == address:
            return True
        name = name[1:] if name.startswith("*.") else name
        if name and (host.endswith(name if name.startswith(".") else f".{name}") or host == name):
            return True
    return False


async def open_tunnel(
    proxy: Proxy,
    cluster: Cluster,
    context: ssl.SSLContext,
    make: Callable[[], ApiConnection],
    user_agent: str,
    happy_eyeballs: float | None,
) -> ApiConnection:
    """Return a connection to the https server of a cluster through a proxy. Raises ConnectionFailed and OSError; the
    caller sets a timeout. An https proxy is verified with the cluster's certificate authorities, as in Go."""
    loop = asyncio.get_running_loop()
    target = cluster.server.authority
    answer = asyncio.StreamReader()
    transport, _ = await loop.create_connection(
        lambda: asyncio.StreamReaderProtocol(answer),
        proxy.host,
        proxy.port,
        ssl=context if proxy.scheme == "https" else None,
        server_hostname=proxy.host if proxy.scheme == "https" else None,
        happy_eyeballs_delay=happy_eyeballs,
    )
    try:
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", f"User-Agent: {user_agent}", *proxy.headers()]
        transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        trouble, inner = await _refusal(answer), None
        if not trouble:
            connection = make()
            inner = await loop.start_tls(transport, connection, context, server_hostname=cluster.server_hostname)
        if inner is None:
            raise ConnectionFailed(f"{target} through {proxy}: {trouble or _CLOSED}")
        connection.connection_made(inner)
    except BaseException:
        transport.abort()
        raise
    return connection


async def _refusal(answer: asyncio.StreamReader) -> str:
    """Read the answer to CONNECT; return the reason why the tunnel is not open, or '' if it is open."""
    try:
        status = _STATUS.fullmatch(await answer.readuntil(b"\r\n"))
        if status is None:
            return "the server at this address is no HTTP proxy"
        if not status[1].startswith(b"2"):
            return f"the proxy refuses the connection: {b' '.join(status.groups(b'')).decode('latin-1')[:100]}"
        for _ in range(_MOST_HEADERS):
            if await answer.readuntil(b"\r\n") == b"\r\n":
                return ""
    except asyncio.IncompleteReadError:
        return _CLOSED
    except OSError as error:
        return f"{_CLOSED}: {os_reason(error)}"
    except asyncio.LimitOverrunError:
        pass
    return "the proxy's answer has no end"
