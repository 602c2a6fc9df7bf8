import asyncio
import base64
import json
import os
import re
import signal
import stat
import textwrap
from asyncio.subprocess import Process, SubprocessStreamProtocol
from pathlib import Path

import pytest
import yaml

from kubeproxy.api import credentials
from kubeproxy.api.cluster import parse_server
from kubeproxy.api.credentials import TokenFile
from kubeproxy.api.http import HttpClient
from kubeproxy.api.kubeconfig import in_cluster, load_cluster
from kubeproxy.api.status import StatusError
from kubeproxy.errors import ConfigError, SourceError
from support.scripted import TLS, Server, eventually

CA = (TLS / "ca.crt").read_bytes()


def encoded(data):
    return base64.b64encode(data).decode()


def kubeconfig(folder, *, cluster=None, user=None, **top):
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "broken", "context": 5},
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "x"}},
        ],
        "clusters": [
            {"name": "other", "cluster": []},
            {"name": "c", "cluster": cluster or {"server": "http://1.2.3.4"}},
        ],
        "users": [{"name": "u", "user": user if user is not None else {}}, 7],
        **top,
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def headers_of(cluster):
    return dict(asyncio.run(cluster.credentials.headers()))


SERVERS = [
    ("http://1.2.3.4", "http://1.2.3.4:80"),
    ("https://1.2.3.4", "https://1.2.3.4:443"),
    ("https://h.example:6443/", "https://h.example:6443"),
    ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
    ("https://rancher/k8s/clusters/c-1", "https://rancher:443/k8s/clusters/c-1"),
    ("127.0.0.1:8080", "http://127.0.0.1:8080"),
    ("localhost:8080", "http://localhost:8080"),
]


@pytest.mark.parametrize(("text", "url"), SERVERS)
def test_servers(text, url):
    assert parse_server(text, "f").url == url


NO_SERVERS = ["", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://a b", "http://u:p@x", "http://x?y"]


@pytest.mark.parametrize("text", [*NO_SERVERS, "http://[::1", "http://x\n"])
def test_invalid_urls_of_servers(text):
    with pytest.raises(ConfigError, match=r"^field: "):
        parse_server(text, "field")


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@10.0.0.1:6443",
        "https://hunter2@10.0.0.1",
        "user:hunter2@10.0.0.1:6443",
        "https://user:hunter2/x@10.0.0.1",
        "ftp://user:hunter2@x y",
        "https://10.0.0.1?token=hunter2",
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match=r"^field: ") as caught:
        parse_server(text, "field")
    assert "hunter2" not in str(caught.value)


def test_impersonation_sends_the_headers_of_client_go(tmp_path):
    user = {
        "token": "t",
        "as": "jane",
        "as-uid": "42",
        "as-groups": ["dev", "ops"],
        "as-user-extra": {"acme.com/Scope": ["a", "b"], "50%é": [""], "none": None},
    }
    cluster = load_cluster(kubeconfig(tmp_path, user=user), "")
    *ours, last = asyncio.run(cluster.credentials.headers())
    assert last == ("Authorization", "Bearer t")
    assert sorted(ours) == [
        ("Impersonate-Extra-50%25%C3%A9", ""),
        ("Impersonate-Extra-acme.com%2FScope", "a"),
        ("Impersonate-Extra-acme.com%2FScope", "b"),
        ("Impersonate-Group", "dev"),
        ("Impersonate-Group", "ops"),
        ("Impersonate-Uid", "42"),
        ("Impersonate-User", "jane"),
    ]


@pytest.mark.parametrize("given", [{"token": "t"}, {"username": "u"}, {"tokenFile": "token"}])
def test_a_plugin_beside_other_credentials_is_not_asked(tmp_path, given):
    """As in client-go, where a request with an Authorization header does not use the plugin."""
    (tmp_path / "token").write_text("t")
    user = {**given, "exec": {"apiVersion": EXEC, "command": "false"}}
    assert list(headers_of(load_cluster(kubeconfig(tmp_path, user=user), ""))) == ["Authorization"]


USERS = [
    ({}, {}),
    ({"token": " abc\n"}, {"Authorization": "Bearer abc"}),
    ({"username": "u", "password": "p:w"}, {"Authorization": "Basic " + encoded(b"u:p:w")}),
    ({"token": "t", "as": "system:node:a"}, {"Authorization": "Bearer t", "Impersonate-User": "system:node:a"}),
    ({"tokenFile": "token", "token": "ignored"}, {"Authorization": "Bearer from-file"}),
]


@pytest.mark.parametrize(("user", "headers"), USERS)
def test_users(tmp_path, user, headers):
    (tmp_path / "token").write_text("from-file\n")
    assert headers_of(load_cluster(kubeconfig(tmp_path, user=user), "")) == headers


EXEC = "client.authentication.k8s.io/v1"
WRONG = [
    ({"cluster": {"server": "http://x", "proxy-url": "p:3128"}}, r"clusters\[c\].cluster.proxy-url: is no URL"),
    ({"cluster": {"certificate-authority-data": "x"}}, r"cluster.certificate-authority-data: is not base64"),
    ({"cluster": {"server": 5}}, r"clusters\[c\].cluster.server: Expected `str`, got `int`"),
    ({"cluster": {"insecure-skip-tls-verify": True}}, r"clusters\[c\].cluster.server: is missing"),
    ({"cluster": {"server": "https://x", "insecure-skip-tls-verify": True, "certificate-authority": "ca"}}, "beside"),
    ({"cluster": {"server": "https://x", "certificate-authority": "none.crt"}}, r"certificate-authority .*none.crt"),
    ({"cluster": {"server": "https://x", "certificate-authority-data": encoded(b"junk")}}, "no usable certificates"),
    ({"cluster": {"server": "http:///"}}, r"clusters\[c\].cluster.server: 'http:///' is no server"),
    ({"user": 5}, r"users\[u\].user: Expected `object`"),
    ({"user": {"token": 5}}, r"users\[u\].user.token: Expected `str \| null`"),
    ({"user": {"token": "a b"}}, r"users\[u\].user.token: the token has characters"),
    ({"user": {"auth-provider": {"name": "gcp"}}}, r"users\[u\].user.auth-provider: was removed"),
    ({"user": {"token": "t", "username": "u"}}, r"users\[u\].user.username"),
    ({"user": {"token": "t", "exec": {}}}, r"users\[u\].user.exec.apiVersion"),
    ({"user": {"as-groups": ["g"]}}, r"users\[u\].user.as: is missing"),
    ({"user": {"as-uid": "1"}}, r"users\[u\].user.as: is missing"),
    ({"user": {"as-user-extra": {"k": ["v"]}}}, r"users\[u\].user.as: is missing"),
    ({"user": {"as": "a\nb"}}, r"users\[u\].user.as: has characters"),
    ({"user": {"as": "a", "as-groups": ["g", "h\n"]}}, r"users\[u\].user.as-groups\[1\]: has characters"),
    ({"user": {"as": "a", "as-user-extra": {"k": ["\x1b"]}}}, r"user.as-user-extra\[k\]\[0\]: has characters"),
    ({"user": {"as": "a", "as-groups": "g"}}, r"users\[u\].user.as-groups: Expected `array"),
    ({"user": {"exec": {"command": "x"}}}, r"users\[u\].user.exec.apiVersion: '' is not supported"),
    ({"user": {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1"}}}, "apiVersion"),
    ({"user": {"exec": {"apiVersion": EXEC}}}, r"exec.command: is missing"),
    ({"user": {"exec": {"apiVersion": EXEC, "command": "x", "interactiveMode": "Always"}}}, "interactiveMode"),
    ({"user": {"exec": {"args": "x"}}}, r"users\[u\].user.exec.args"),
    ({"current-context": ""}, "current-context: is not set"),
    ({"current-context": "none"}, "contexts: has no entry named 'none'"),
    ({"current-context": "broken"}, r"contexts\[broken\].context: Expected `object`"),
    ({"clusters": None}, "clusters: has no entry named 'c'"),
    ({"users": {}}, "users: has no entry named 'u'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_mistake_is_named_with_file_and_field(tmp_path, change, message):
    path = kubeconfig(tmp_path, **change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path, "")
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "a: b: c", "- x", "", "\t", "5", "!!python/object/apply:os.system [ls]", "&a [*a]"]
)
def test_files_that_are_no_kubeconfig(tmp_path, text):
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        load_cluster(str(path), "")


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_cluster(str(path), "")


def test_tokens_are_not_in_messages(tmp_path):
    for user in ({"token": "s3cret s3cret"}, {"token": ["s3cret"]}, {"client-key-data": "s3cret!"}):
        with pytest.raises(ConfigError) as caught:
            load_cluster(kubeconfig(tmp_path, user=user), "")
        assert "s3cret" not in str(caught.value)


def test_json_is_read_too(tmp_path):
    document = yaml.safe_load(Path(kubeconfig(tmp_path, user={"token": "t"})).read_text())
    (tmp_path / "json").write_text(json.dumps(document, indent=1))
    assert headers_of(load_cluster(str(tmp_path / "json"), "")) == {"Authorization": "Bearer t"}


def test_master_goes_before_the_kubeconfig(tmp_path):
    path = kubeconfig(tmp_path, user={"token": "t"})
    cluster = load_cluster(path, "http://5.6.7.8:99")
    assert cluster.server.url == "http://5.6.7.8:99"
    assert headers_of(cluster) == {"Authorization": "Bearer t"}
    assert headers_of(load_cluster("", "127.0.0.1:8080")) == {}
    with pytest.raises(ConfigError, match="--master"):
        load_cluster("", "nonsense://x")


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "pki").mkdir()
    for name in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / "pki" / name).write_bytes((TLS / name).read_bytes())
    user = {"client-certificate": "pki/client.crt", "client-key": "pki/client.key"}
    cluster = {"server": "x:1", "certificate-authority": "pki/ca.crt"}
    assert load_cluster(kubeconfig(tmp_path, cluster=cluster, user=user), "").server.url == "https://x:1"
    for name in ("client.crt", "client.key"):
        held = (tmp_path / "pki" / name).read_bytes()
        (tmp_path / "pki" / name).unlink()
        with pytest.raises(ConfigError, match=name):
            load_cluster(kubeconfig(tmp_path, cluster=cluster, user=user), "")
        (tmp_path / "pki" / name).write_bytes(held)


def test_inline_certificates_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    user = {
        "client-certificate-data": encoded((TLS / "client.crt").read_bytes()),
        "client-key-data": encoded((TLS / "client.key").read_bytes()),
    }
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority-data": encoded(CA)}
    load_cluster(kubeconfig(tmp_path, cluster=cluster, user=user), "")
    assert list((tmp_path / "tmp").iterdir()) == []
    with pytest.raises(ConfigError, match="client-key: is missing"):
        load_cluster(kubeconfig(tmp_path, cluster=cluster, user={**user, "client-key-data": ""}), "")
    user["client-key-data"] = encoded((TLS / "server.key").read_bytes())
    with pytest.raises(ConfigError, match="cannot be used together"):
        load_cluster(kubeconfig(tmp_path, cluster=cluster, user=user), "")


# the service account of a pod


def test_in_cluster(tmp_path):
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_bytes(CA)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    cluster = load_cluster("", "", environ=environ, service_account=str(tmp_path))
    assert cluster.server.url == "https://[fd00::1]:443"
    assert headers_of(cluster) == {"Authorization": "Bearer first"}


def test_outside_of_a_pod(tmp_path):
    with pytest.raises(ConfigError, match="give --kubeconfig or --master"):
        in_cluster(environ={})
    environ = {"KUBERNETES_SERVICE_HOST": "1.2.3.4", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match="token; is it mounted"):
        in_cluster(environ=environ, service_account=str(tmp_path))


def test_a_token_file_is_read_once_a_minute_and_when_refused(tmp_path, caplog):
    now = 0.0
    path = tmp_path / "token"
    path.write_text("one")
    token = TokenFile(str(path), clock=lambda: now)

    def current():
        return dict(asyncio.run(token.headers()))["Authorization"]

    assert current() == "Bearer one"
    path.write_text("two")
    now = 59.0
    assert current() == "Bearer one"
    now = 60.0
    assert current() == "Bearer two"
    path.write_text("three")
    token.invalidate((("Authorization", "Bearer one"),))  # the answer to an older request
    assert current() == "Bearer two"
    token.invalidate((("Authorization", "Bearer two"),))
    assert current() == "Bearer three"
    path.write_text("\n")  # as between truncation and write of the rotated file
    now = 120.0
    assert current() == "Bearer three"
    path.write_bytes(b"\xff\xfe")
    now = 180.0
    assert current() == "Bearer three"
    path.unlink()
    now = 240.0
    assert current() == "Bearer three"
    path.write_text("four")
    now = 300.0
    assert current() == "Bearer four"
    assert re.findall("cannot be used: (.*)", caplog.text) == [
        "it is empty",
        "the token has characters that are invalid in a header",
        "No such file or directory",
    ]
    path.write_text("")
    with pytest.raises(SourceError, match=r"the token file .* \(the service account's\) cannot be used: it is empty"):
        asyncio.run(TokenFile(str(path)).headers())


def test_a_token_file_that_is_missing_is_named_with_its_field(tmp_path):
    file = kubeconfig(tmp_path, user={"tokenFile": "gone"})
    with pytest.raises(SourceError, match=rf"the token file .*gone \({file}: users\[.*\]\.user\.tokenFile\) cannot be"):
        headers_of(load_cluster(file, ""))


# exec plugins


def plugin(folder, code, version="v1"):
    """A plugin that runs Python `code`, which sets `status`; the file 'runs' contains the number of its runs."""
    path = folder / "plugin"
    path.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys, time\n"
        "open(os.path.dirname(os.path.abspath(__file__)) + '/runs', 'a').write('x')\n"
        "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        + textwrap.dedent(code)
        + "\nprint(json.dumps({'apiVersion': info['apiVersion'], 'kind': 'ExecCredential', 'status': status}))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"apiVersion": f"client.authentication.k8s.io/{version}", "command": "./plugin", "interactiveMode": "Never"}


def runs(folder):
    return len((folder / "runs").read_text())


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_an_exec_plugin_runs_once_and_again_when_refused(tmp_path, version):
    entry = plugin(tmp_path, "status = {'token': sys.argv[1] + os.environ['SUFFIX'], 'x': 1}", version)
    entry |= {"args": ["tok"], "env": [{"name": "SUFFIX", "value": "en"}]}
    cluster = load_cluster(kubeconfig(tmp_path, user={"exec": entry}), "")

    async def use():
        together = await asyncio.gather(*(cluster.credentials.headers() for _ in range(4)))
        assert together == [(("Authorization", "Bearer token"),)] * 4
        assert runs(tmp_path) == 1
        cluster.credentials.invalidate(())
        await cluster.credentials.headers()
        assert runs(tmp_path) == 1
        cluster.credentials.invalidate(together[0])
        await cluster.credentials.headers()
        assert runs(tmp_path) == 2
        assert await cluster.credentials.key_pair() is None

    asyncio.run(use())


@pytest.mark.parametrize(
    ("expiry", "expected"), [("2000-01-01T00:00:00Z", 2), ("2999-01-01T00:00:00+01:00", 1), ("soon", 1)]
)
def test_an_exec_credential_that_expired_is_renewed(tmp_path, expiry, expected):
    entry = plugin(tmp_path, f"status = {{'token': 't', 'expirationTimestamp': {expiry!r}}}")
    cluster = load_cluster(kubeconfig(tmp_path, user={"exec": entry}), "")

    async def use():
        await cluster.credentials.headers()
        await cluster.credentials.headers()

    asyncio.run(use())
    assert runs(tmp_path) == expected


def test_an_exec_plugin_gets_the_cluster_information(tmp_path):
    entry = plugin(
        tmp_path, "cluster = info['spec']['cluster']; status = {'token': cluster['server'] + cluster['config']['a']}"
    )
    entry["provideClusterInfo"] = True
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"a": "/x"}}]
    path = kubeconfig(tmp_path, cluster={"server": "http://h:1", "extensions": extensions}, user={"exec": entry})
    assert headers_of(load_cluster(path, "")) == {"Authorization": "Bearer http://h:1/x"}


def test_an_exec_plugin_has_the_proxys_environment_and_the_kubeconfigs_additions(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_PROXY", "a")
    monkeypatch.setenv("OF_BOTH", "b")
    shown = "status = {'token': '/'.join(os.environ[n] for n in ('OF_THE_PROXY', 'OF_BOTH', 'OF_THE_FILE'))}"
    entry = plugin(tmp_path, shown)
    entry["env"] = [{"name": "OF_BOTH", "value": "c"}, {"name": "OF_THE_FILE", "value": "d"}]
    given = {"exec": entry, "client-key-data": "c2VjcmV0", "client-certificate-data": "Yw=="}
    cluster = load_cluster(kubeconfig(tmp_path, user=given), "")
    assert headers_of(cluster) == {"Authorization": "Bearer a/c/d"}


EXEC_FAILURES = [
    ("sys.exit('no login')", "exit code 1: no login"),
    ("sys.exit('refused: token=abcdefgh' + 'x' * 490)", "exit code 1: refused: token=<redacted>$"),
    ("sys.stderr.write('x' * 3_000_000 + 'the end'); sys.exit(1)", "exit code 1: x+the end"),
    ("while True: sys.stdout.write('x' * 100_000)", "printed more than 1048576 bytes"),
    ("print('junk'); status = {}", "no usable ExecCredential"),
    ("status = {}", "neither a token nor"),
    ("status = {'token': 'a b'}", "no usable ExecCredential"),
    ("info['apiVersion'] = 'v9'; status = {}", "v9 ExecCredential"),
]


@pytest.mark.parametrize(("code", "message"), EXEC_FAILURES)
def test_an_exec_plugin_that_fails_is_a_source_error(tmp_path, code, message):
    cluster = load_cluster(kubeconfig(tmp_path, user={"exec": plugin(tmp_path, code)}), "")
    with pytest.raises(SourceError, match=message) as caught:
        headers_of(cluster)
    assert "users[u].user.exec" in str(caught.value)


def test_the_install_hint_of_a_missing_exec_plugin_is_reported(tmp_path):
    entry = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin", "installHint": "install it"}
    with pytest.raises(SourceError, match=r"no-such-plugin cannot be run.*install it"):
        headers_of(load_cluster(kubeconfig(tmp_path, user={"exec": entry}), ""))


@pytest.fixture
def limits(monkeypatch):
    """The time limits of running exec plugins: a test can make one expire after the plugin has done its part."""
    limits, original = [], asyncio.timeout

    def timeout(seconds):
        limits.append(original(seconds))
        return limits[-1]

    monkeypatch.setattr(credentials.asyncio, "timeout", timeout)
    return limits


async def running(number, limits):
    """Wait until a plugin runs under its time limit, and has written the id of a process; return both."""
    await eventually(lambda: number.exists() and limits)
    return int(number.read_text()), limits[0]


def test_an_exec_plugin_that_hangs_is_ended(tmp_path, limits):
    number = tmp_path / "pid"
    entry = plugin(tmp_path, WRITE_PID)
    entry["args"] = [str(number)]
    asked = load_cluster(kubeconfig(tmp_path, user={"exec": entry}), "").credentials

    async def main():
        asking = asyncio.create_task(asked.headers())
        pid, limit = await running(number, limits)
        limit.reschedule(0)
        with pytest.raises(SourceError, match="did not end within 60 s"):
            await asking
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


WRITE_PID = """\
    open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))
    os.rename(sys.argv[1] + '.new', sys.argv[1])
    time.sleep(1000)
"""


def shell_plugin(folder, code):
    """A plugin as a shell script, whose argument is a file for the id of a process; its credentials, and the file."""
    path, number = folder / "plugin", folder / "pid"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    entry = {"apiVersion": EXEC, "command": "./plugin", "interactiveMode": "Never", "args": [str(number)]}
    return load_cluster(kubeconfig(folder, user={"exec": entry}), "").credentials, number


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves the session"])
@pytest.mark.parametrize("how", ["hangs", "cancelled"])
def test_children_of_an_exec_plugin_delay_no_request(tmp_path, limits, how, leaves):
    """A shell script that runs the program: the program has the script's output, and no process waits for it."""
    child = """sh -c 'echo $$ > "$1.new"; mv "$1.new" "$1"; exec sleep 1000' child "$1" &"""
    asked, number = shell_plugin(tmp_path, f"{'setsid ' if leaves else ''}{child}\nwait")

    async def main():
        asking = asyncio.create_task(asked.headers())
        pid, limit = await running(number, limits)
        if how == "cancelled":
            asking.cancel()
        else:
            limit.reschedule(0)
        with pytest.raises(SourceError if how == "hangs" else asyncio.CancelledError):
            await asking
        if leaves:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: has_ended(pid))

    asyncio.run(main())


def has_ended(pid):
    """Return whether a process has ended; init may collect its status later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith(("Z", "X"))
    except OSError:
        return True


def test_an_exec_plugin_that_cannot_be_killed_delays_no_request(monkeypatch):
    """A program with another user's rights, which a proxy without root may not kill."""
    monkeypatch.setattr(credentials, "_END_TIMEOUT", 0.1)
    kill = os.kill

    def refuse(*_):
        raise PermissionError

    async def main():
        loop, pipe = asyncio.get_running_loop(), asyncio.subprocess.PIPE
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(1 << 16, loop), "sleep", "1000", stdout=pipe, stderr=pipe
        )
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", refuse)
            patched.setattr(os, "kill", refuse)
            await credentials._end(Process(transport, protocol, loop), transport)
        kill(transport.get_pid(), signal.SIGKILL)
        await Process(transport, protocol, loop).wait()

    asyncio.run(main())


def test_an_exec_certificate_is_shown_and_a_refusal_renews_it(tmp_path):
    shown = []

    async def script(request, reply):
        shown.append(reply.writer.get_extra_info("peercert"))
        await (reply.status(401) if len(shown) == 1 else reply.answer(200, b"{}"))

    data = {name: (TLS / f"client.{name}").read_text() for name in ("crt", "key")}
    code = f"status = {{'clientCertificateData': {data['crt']!r}, 'clientKeyData': {data['key']!r}}}"
    entry = plugin(tmp_path, code)

    async def main():
        async with Server(script, tls=True) as server:
            cluster = {"server": server.url, "certificate-authority-data": encoded(CA)}
            client = HttpClient(load_cluster(kubeconfig(tmp_path, cluster=cluster, user={"exec": entry}), ""))
            with pytest.raises(StatusError, match="code 401"):
                await client.request("GET", "/x")
            await client.request("GET", "/x")
            await client.close()

    asyncio.run(main())
    assert shown[0]["subject"] == ((("commonName", "client"),),)
    assert runs(tmp_path) == 2
