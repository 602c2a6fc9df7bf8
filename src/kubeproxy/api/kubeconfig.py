"""Reads a kubeconfig file, or the service account of a pod, into a Cluster. Source: clientcmd and transport of
client-go. Only the entries of the current context are decoded, so that an invalid entry for another cluster has no
effect. Every error is a ConfigError that names the file and the field."""

from __future__ import annotations

import base64
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kubeproxy.api import credentials
from kubeproxy.api.cluster import Cluster, Server, Trust, parse_server, read_file
from kubeproxy.api.proxy import proxy_of
from kubeproxy.config.yaml_text import load_yaml
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import host_port

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder in which the kubelet mounts a pod's service account."""

_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"

# The characters of a header's name (RFC 9110, 5.6.2), except the percent sign, which begins an escape.
_LEGAL: Final = frozenset((string.ascii_letters + string.digits + "!#$&'*+-.^_`|~").encode())

_T = TypeVar("_T", bound=Struct)


class _Extension(Struct):
    name: str = ""
    extension: Any = None


class _ClusterEntry(Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool | None = None
    tls_server_name: str | None = None
    proxy_url: str | None = None
    extensions: list[_Extension] | None = None


class _UserEntry(Struct, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    exec: credentials.ExecConfig | None = None
    auth_provider: Any = None
    as_: str | None = field(default=None, name="as")
    as_uid: str | None = None
    as_groups: list[str] | None = None
    as_user_extra: dict[str, list[str] | None] | None = None


class _ContextEntry(Struct):
    cluster: str = ""
    user: str | None = None


def load_cluster(
    kubeconfig: str, master: str, *, environ: Mapping[str, str] = os.environ, service_account: str = SERVICE_ACCOUNT
) -> Cluster:
    """Return the Cluster of the flags --kubeconfig and --master; a flag that is not given is ''. Raises ConfigError,
    and Unsupported for a proxy that is neither http nor https. --master takes precedence over the kubeconfig's server;
    --master alone gives a server without credentials; if neither flag is given, the pod's service account is used.
    `environ` may name a proxy (proxy.py)."""
    if kubeconfig:
        return _from_kubeconfig(kubeconfig, master, environ)
    if master:
        server = parse_server(master, "--master")
        return Cluster(server, Trust(), credentials.Credentials(), proxy_of(server, "", "", environ))
    return in_cluster(environ=environ, service_account=service_account)


def in_cluster(*, environ: Mapping[str, str] = os.environ, service_account: str = SERVICE_ACCOUNT) -> Cluster:
    """Return the Cluster of a pod's service account. Raises ConfigError outside of a pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ConfigError(
            "kubeconfig: not given, and this is no pod (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not"
            " set); give --kubeconfig or --master"
        )
    token, authority = f"{service_account}/token", f"{service_account}/ca.crt"
    for path in (token, authority):
        if not Path(path).is_file():
            raise ConfigError(f"kubeconfig: not given, and the service account has no {path}; is it mounted?")
    server = parse_server(f"https://{host_port(host, port)}", "KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT")
    trust = Trust(ca_file=authority, cluster_field="service account")
    return Cluster(server, trust, credentials.TokenFile(token), proxy_of(server, "", "", environ))


def _from_kubeconfig(path: str, master: str, environ: Mapping[str, str]) -> Cluster:
    document = _load(path)
    current = document.get("current-context") or ""
    if not isinstance(current, str) or not current:
        raise ConfigError(f"{path}: current-context: is not set; set it to the name of one of the contexts")
    context = _entry(path, document, "contexts", "context", current, _ContextEntry)
    cluster = _entry(path, document, "clusters", "cluster", context.cluster, _ClusterEntry)
    user = _entry(path, document, "users", "user", context.user, _UserEntry) if context.user else _UserEntry()
    cluster_field = f"{path}: clusters[{context.cluster}].cluster"
    user_field = f"{path}: users[{context.user}].user"
    folder = Path(path).absolute().parent

    trust = _trust(cluster, user, folder, cluster_field, user_field)
    server = _server(cluster, master, trust, cluster_field)
    proxy = proxy_of(server, cluster.proxy_url or "", f"{cluster_field}.proxy-url", environ)
    return Cluster(server, trust, _credentials(user, server, cluster, trust, folder, user_field), proxy)


def _load(path: str) -> dict[str, Any]:
    try:
        document = load_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"kubeconfig: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"kubeconfig: {path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"kubeconfig: {path} is not a kubeconfig: expected an object at the top")
    return document


def _entry(path: str, document: dict[str, Any], plural: str, singular: str, name: str, kind: type[_T]) -> _T:
    entries = document.get(plural)
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name:
            where = f"{path}: {plural}[{name}].{singular}"
            try:
                return msgspec.convert(entry.get(singular), kind)
            except (ValueError, RecursionError) as error:
                reason, _, inner = str(error).partition(" - at `$")
                raise ConfigError(f"{where}{inner.rstrip('`')}: {reason}") from error
    raise ConfigError(f"{path}: {plural}: has no entry named {name!r}, which the current context needs")


def _trust(cluster: _ClusterEntry, user: _UserEntry, folder: Path, cluster_field: str, user_field: str) -> Trust:
    ca_data = _base64(cluster.certificate_authority_data, f"{cluster_field}.certificate-authority-data")
    insecure = bool(cluster.insecure_skip_tls_verify)
    if insecure and (ca_data or cluster.certificate_authority):
        raise ConfigError(
            f"{cluster_field}.insecure-skip-tls-verify: cannot be true beside a certificate authority; remove one"
        )
    return Trust(
        ca_file=_resolve(cluster.certificate_authority, folder) if not ca_data else "",
        ca_data=ca_data,
        certificate_file=_resolve(user.client_certificate, folder) if not user.client_certificate_data else "",
        certificate_data=_base64(user.client_certificate_data, f"{user_field}.client-certificate-data"),
        key_file=_resolve(user.client_key, folder) if not user.client_key_data else "",
        key_data=_base64(user.client_key_data, f"{user_field}.client-key-data"),
        insecure=insecure,
        server_name=cluster.tls_server_name or "",
        cluster_field=cluster_field,
        user_field=user_field,
    )


def _server(cluster: _ClusterEntry, master: str, trust: Trust, cluster_field: str) -> Server:
    where, text = ("--master", master) if master else (f"{cluster_field}.server", cluster.server)
    if not text:
        raise ConfigError(f"{where}: is missing; give the URL of the API server")
    uses_tls = trust.ca_file or trust.ca_data or trust.certificate_file or trust.certificate_data or trust.insecure
    return parse_server(text, where, default_scheme="https" if uses_tls else "http")


def _credentials(
    user: _UserEntry, server: Server, cluster: _ClusterEntry, trust: Trust, folder: Path, where: str
) -> credentials.Credentials:
    if user.auth_provider is not None:
        raise ConfigError(f"{where}.auth-provider: was removed from Kubernetes in 1.26; use exec or a token instead")
    headers = _impersonation(user, where)
    token_given = bool(user.token or user.token_file)
    plugin = _exec(user.exec, server, cluster, trust, folder, where, headers) if user.exec is not None else None
    if user.username or user.password:
        if token_given:
            raise ConfigError(f"{where}.username: cannot be used together with a token; remove one")
        pair = base64.b64encode(f"{user.username or ''}:{user.password or ''}".encode()).decode()
        return credentials.Credentials((*headers, ("Authorization", f"Basic {pair}")), f"{where}.username and password")
    if plugin is not None and not token_given:  # as in client-go, a token in the file takes precedence over the plugin
        return plugin
    try:
        token = credentials.check_token((user.token or "").strip())
    except ValueError as error:
        raise ConfigError(f"{where}.token: {error}") from error
    if user.token_file:
        path = _resolve(user.token_file, folder)
        return credentials.TokenFile(path, token=token, headers=headers, field=f"{where}.tokenFile")
    if token:
        return credentials.Credentials((*headers, credentials.bearer(token)), f"{where}.token")
    return credentials.Credentials(headers)


def _impersonation(user: _UserEntry, where: str) -> credentials.Headers:
    """Return the headers by which requests impersonate another user; `where` is the user's path in the kubeconfig."""
    groups: Sequence[str] = user.as_groups or ()
    extra = user.as_user_extra or {}
    if (user.as_uid or groups or extra) and not user.as_:
        raise ConfigError(f"{where}.as: is missing; a uid, groups and extra can only be set together with a user")
    wanted = [("as", "Impersonate-User", user.as_ or ""), ("as-uid", "Impersonate-Uid", user.as_uid or "")]
    wanted += [(f"as-groups[{index}]", "Impersonate-Group", group) for index, group in enumerate(groups)]
    wanted += [
        (f"as-user-extra[{key}][{index}]", f"Impersonate-Extra-{_escaped(key)}", value)
        for key, values in extra.items()
        for index, value in enumerate(values or ())
    ]
    for setting, _, value in wanted:
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"{where}.{setting}: has characters that cannot stand in a header")
    return tuple((name, value) for setting, name, value in wanted if value or setting.startswith("as-user-extra"))


def _escaped(key: str) -> str:
    return "".join(chr(byte) if byte in _LEGAL else f"%{byte:02X}" for byte in key.encode())


def _exec(
    entry: credentials.ExecConfig,
    server: Server,
    cluster: _ClusterEntry,
    trust: Trust,
    folder: Path,
    where: str,
    headers: credentials.Headers,
) -> credentials.ExecPlugin:
    where = f"{where}.exec"
    if entry.api_version not in _EXEC_VERSIONS:
        raise ConfigError(f"{where}.apiVersion: {entry.api_version!r} is not supported; use {_EXEC_VERSIONS[0]}")
    if not entry.command:
        raise ConfigError(f"{where}.command: is missing")
    if entry.interactive_mode not in {None, "Never", "IfAvailable"}:
        raise ConfigError(f"{where}.interactiveMode: must be Never or IfAvailable, a proxy has no terminal")
    # As in client-go, a command with a slash is relative to the kubeconfig's folder; any other command is searched for
    # in PATH.
    command = _resolve(entry.command, folder) if "/" in entry.command else entry.command
    info = _exec_cluster(server, cluster, trust, where) if entry.provide_cluster_info else None
    return credentials.ExecPlugin(replace(entry, command=command), where, info, headers=headers)


def _exec_cluster(server: Server, cluster: _ClusterEntry, trust: Trust, where: str) -> dict[str, Any]:
    authority = trust.ca_data or read_file(trust.ca_file, f"{where}.provideClusterInfo")
    info = {
        "tls-server-name": trust.server_name,
        "proxy-url": cluster.proxy_url,
        "insecure-skip-tls-verify": trust.insecure,
        "certificate-authority-data": base64.b64encode(authority).decode(),
    }
    config = [{"config": one.extension} for one in cluster.extensions or () if one.name == _EXEC_EXTENSION]
    return {"server": server.url, **{name: value for name, value in info.items() if value}, **(config or [{}])[-1]}


def _base64(text: str | None, where: str) -> bytes:
    try:
        return base64.b64decode("".join((text or "").split()), validate=True)
    except ValueError as error:
        raise ConfigError(f"{where}: is not base64: {error}") from error


def _resolve(path: str | None, folder: Path) -> str:
    return str(folder / path) if path else ""
