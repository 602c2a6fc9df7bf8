"""HTTP proxies on the way to the API server: their selection, and the requests through them."""

import asyncio
import contextlib
import logging
import ssl

import pytest

from kubeproxy.api.cluster import Cluster, Proxy, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.api.proxy import bypassed, proxy_of
from kubeproxy.api.status import ConnectionFailed
from kubeproxy.errors import ConfigError, Unsupported
from support.scripted import TLS, Server

SECRET = "p%40ss:w"  # p@ss:w in the form of a URL
BASIC = "Basic dTpwQHNzOnc="  # u:p@ss:w, decoded
API = "https://api.example.com:6443"


# results of golang.org/x/net/http/httpproxy
@pytest.mark.parametrize(
    ("no_proxy", "reached_directly", "through_the_proxy"),
    [
        ("", "localhost:1 127.0.0.1:1 127.9.9.9:1 [::1]:1", "10.0.0.1:1 a.b:1"),
        ("x.y,*", "10.0.0.1:1 a.b:1", ""),
        ("10.0.0.1", "10.0.0.1:6443 10.0.0.1:1 127.0.0.1:1", "10.0.0.10:1 [fd00::1]:1"),
        (" 10.0.0.1:6443 , fd00::1", "10.0.0.1:6443 [fd00::1]:1", "10.0.0.1:1 [fd00::2]:1"),
        ("[fd00::1]:6443", "[fd00::1]:6443", "[fd00::1]:1"),
        ("10.96.0.0/12,fd00::/64", "10.96.0.1:443 10.111.0.1:1 [fd00::9]:443", "10.112.0.1:1 [fd00:1::9]:443 a.b:1"),
        ("example.com", "example.com:1 api.example.com:1 API.Example.com:1", "badexample.com:1 example.com.x:1"),
        (".example.com", "api.example.com:1", "example.com:1 badexample.com:1"),
        ("*.example.com", "api.example.com:1", "example.com:1 badexample.com:1"),
        ("EXAMPLE.com:6443", "example.com:6443 api.example.com:6443", "api.example.com:1"),
        (",:80,10.0.0.0/99,", "", "10.0.0.1:80 a.b:80"),
        ("*example.com,*:80,[fd00::1],[a.b]", "", "example.com:80 api.example.com:80 [fd00::1]:80 a.b:80"),
    ],
)
def test_no_proxy(no_proxy, reached_directly, through_the_proxy):
    for authorities, wanted in ((reached_directly, True), (through_the_proxy, False)):
        for authority in authorities.split():
            server = parse_server(f"https://{authority}", "test")
            assert (authority, bypassed(server.host, server.port, no_proxy)) == (authority, wanted)


@pytest.mark.parametrize(
    ("server", "environ", "proxy"),
    [
        (API, {}, None),
        (API, {"HTTPS_PROXY": "http://p:3128"}, Proxy("http", "p", 3128)),
        (API, {"https_proxy": "p:3128"}, Proxy("http", "p", 3128)),
        (API, {"HTTPS_PROXY": "http://a", "https_proxy": "http://b"}, Proxy("http", "a", 80)),
        (API, {"HTTPS_PROXY": "", "https_proxy": "https://b"}, Proxy("https", "b", 443)),
        (API, {"HTTPS_PROXY": "http://[fd00::1]:1"}, Proxy("http", "fd00::1", 1)),
        (API, {"HTTPS_PROXY": f"http://u:{SECRET}@p"}, Proxy("http", "p", 80, BASIC)),
        (API, {"HTTPS_PROXY": "http://u@p"}, Proxy("http", "p", 80, "Basic dTo=")),
        (API, {"HTTP_PROXY": "http://p", "ALL_PROXY": "http://p"}, None),
        ("http://10.0.0.1", {"HTTP_PROXY": "http://p"}, Proxy("http", "p", 80)),
        ("http://10.0.0.1", {"HTTPS_PROXY": "http://p"}, None),
        (API, {"HTTPS_PROXY": "http://p", "no_proxy": "example.com"}, None),
        ("https://localhost", {"HTTPS_PROXY": "http://p"}, None),
        (API, {"HTTPS_PROXY": "socks5://p", "NO_PROXY": ".example.com"}, None),
    ],
)
def test_the_proxy_of_the_environment(server, environ, proxy):
    assert proxy_of(parse_server(server, "test"), "", "", environ) == proxy


def test_the_kubeconfig_precedes_the_environment_and_applies_to_loopback_too(tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(
        "{current-context: x, contexts: [{name: x, context: {cluster: c}}],"
        " clusters: [{name: c, cluster: {server: 'http://127.0.0.1:8080', proxy-url: 'http://p:1'}}]}"
    )
    environ = {"HTTP_PROXY": "http://q", "NO_PROXY": "*"}
    assert load_cluster(str(path), "", environ=environ).proxy == Proxy("http", "p", 1)
    assert load_cluster("", "http://10.0.0.1", environ={"HTTP_PROXY": "http://q"}).proxy == Proxy("http", "q", 80)
    assert load_cluster("", "http://10.0.0.1", environ=environ).proxy is None


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        (f"socks5://u:{SECRET}@p", Unsupported, "f: proxies of the kind 'socks5' are not supported; give an http"),
        (f"http://u:{SECRET}/@p", ConfigError, "f: is no URL of a proxy"),
        (f"http://u:{SECRET}@p:port", ConfigError, "f: is no URL of a proxy"),
        (f"http://u:{SECRET}@", ConfigError, "f: is no URL of a proxy"),
        ("http://a b", ConfigError, "f: is no URL of a proxy"),
        ("http://p:0", ConfigError, "f: is no URL of a proxy"),
        ("ftp://p", Unsupported, "f: proxies of the kind 'ftp'"),
    ],
)
def test_an_invalid_proxy_is_refused_without_its_password(url, kind, message):
    with pytest.raises(kind) as caught:
        proxy_of(parse_server(API, "test"), url, "f", {})
    assert str(caught.value).startswith(message)
    assert "ss:w" not in str(caught.value)


def test_a_variable_that_is_no_proxy_is_skipped_and_logged(caplog):
    server = parse_server("https://10.0.0.1:6443", "test")
    assert proxy_of(server, "", "f", {"HTTPS_PROXY": f"http://u:{SECRET}@p:port"}) is None
    assert "HTTPS_PROXY: is no URL of a proxy" in caplog.text
    assert "ss:w" not in caplog.text


class Relay:
    """An HTTP proxy on loopback; it sends `answer` to CONNECT and, if that is a 200, relays all bytes."""

    def __init__(self, answer=b"HTTP/1.1 200 Connection established\r\n\r\n", *, tls=False):
        self.asked = []
        self._answer = answer
        self._tasks = set()
        self._tls = None
        if tls:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(TLS / "server.crt", TLS / "server.key")

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.proxy = Proxy("https" if self._tls else "http", "127.0.0.1", port, BASIC)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.decode())
            writer.write(self._answer)
            if b" 200 " not in self._answer:
                return
            host, _, port = head.split()[1].decode().rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(far_writer):
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    @staticmethod
    async def _pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()


def through(relay, script, use, *, tls=True):
    """Run `use(client)` against `script` through the HTTP proxy."""

    async def main():
        async with Server(script, tls=tls) as server, relay:
            trust = Trust(ca_file=str(TLS / "ca.crt"), server_name="kubernetes.default") if tls else Trust()
            cluster = Cluster(parse_server(server.url, "test"), trust, Credentials(), relay.proxy)
            client = HttpClient(cluster, connect_timeout=15)
            try:
                return await use(client), server
            finally:
                await client.close()

    return asyncio.run(main())


async def well(request, reply):
    await reply.answer(200, b"{}")


@pytest.mark.parametrize("tls", [False, True])
def test_https_goes_through_a_tunnel_that_is_kept(tls):
    relay = Relay(tls=tls)
    received = []

    async def use(client):
        assert (await client.request("GET", "/a")).body == b"{}"
        await client.stream("/b", received.append, on_open=list, idle_timeout=15)

    _, server = through(relay, well, use)
    assert received == [b"{}"]
    assert [request.target for request in server.requests] == ["/a", "/b"]
    assert not any("proxy-authorization" in request.headers for request in server.requests)
    authority = server.url.removeprefix("https://")
    (asked,) = relay.asked
    assert asked.startswith(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: kube-proxy/v")
    assert f"\r\nProxy-Authorization: {BASIC}\r\n" in asked


def test_http_is_asked_of_the_proxy_by_its_whole_url():
    relay = Relay(b"HTTP/1.1 204 X\r\n\r\n")

    async def use(client):
        await client.request("GET", "/version")
        return client.cluster.server.url

    url, server = through(relay, well, use, tls=False)
    assert server.requests == []
    assert relay.asked[0].startswith(f"GET {url}/version HTTP/1.1\r\n")
    assert f"\r\nProxy-Authorization: {BASIC}\r\n" in relay.asked[0]


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\nX: y\r\n\r\n",
            "refuses the connection: 407 Proxy Authentication",
        ),
        (b"HTTP/1.0 403\r\n\r\n", "refuses the connection: 403"),
        (b"", "closed the connection"),
        (b"HTTP/1.1 2", "closed the connection"),
        (b"SSH-2.0-x\r\n", "is no HTTP proxy"),
    ],
)
def test_a_proxy_that_refuses_is_named_without_its_password(answer, trouble, caplog):
    caplog.set_level(logging.DEBUG)
    relay = Relay(answer)
    with pytest.raises(ConnectionFailed, match=trouble) as caught:
        through(relay, well, lambda client: client.request("GET", "/a"))
    assert f"through {relay.proxy}" in str(caught.value)
    for text in (str(caught.value), repr(caught.value), repr(relay.proxy), f"{relay.proxy}", caplog.text):
        assert "dTpw" not in text
        assert "ss:w" not in text


def test_the_server_is_verified_behind_the_proxy():
    async def use(client):
        client.cluster._trust = Trust(ca_file=str(TLS / "ca.crt"), server_name="other")
        await client.request("GET", "/a")

    with pytest.raises(ConnectionFailed, match="certificate"):
        through(Relay(), well, use)


def test_a_proxy_that_does_not_listen():
    relay = Relay()

    async def use(client):
        client.cluster.proxy = Proxy("http", "127.0.0.1", 1)
        await client.request("GET", "/a")

    with pytest.raises(ConnectionFailed, match="connection refused"):
        through(relay, well, use)
