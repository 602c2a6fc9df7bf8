"""Credentials for the API server: fixed headers, a rotating token file, or an exec plugin. Tokens are never logged.
Unavailable credentials raise SourceError, and the caller tries again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from kubeproxy.errors import SourceError
from kubeproxy.server.text import LINE, redact

log = logging.getLogger("kubeproxy.api")

TOKEN_LIFETIME = 60.0
"""Seconds after which a token file is read again, as in client-go; the kubelet rotates the token long before expiry."""

EXEC_TIMEOUT = 60.0  # the maximum number of seconds that an exec plugin may take
LONGEST = 1 << 20  # the maximum number of bytes that an exec plugin may print
_READ_AHEAD = 1 << 16  # bytes; asyncio's default
_END_TIMEOUT = 1.0  # seconds to wait for the end of a killed plugin
_EXPIRY_MARGIN = 10.0

Headers = tuple[tuple[str, str], ...]  # names and values; a name may occur more than once


class KeyPair(NamedTuple):
    """A client certificate and its private key, PEM."""

    certificate: bytes
    key: bytes


class Credentials:
    """Fixed credentials, the same headers for every request; base class of the other kinds."""

    files: tuple[str, ...] = ()  # files that are read again while the credentials are in use
    program = ""  # program that is run to get the credentials, or ''

    def __init__(self, headers: Headers = (), name: str = "") -> None:
        self._fixed = headers
        self.name = name  # kind and origin of the credentials for messages, or ''

    async def headers(self) -> Headers:
        """Return the headers of one request. Raises SourceError if they are unavailable."""
        return self._fixed

    async def key_pair(self) -> KeyPair | None:
        """Return the client certificate of the credentials, if any."""
        return None

    def invalidate(self, used: Headers) -> None:
        """Discard the credentials after the server refused a request with the headers `used` (401)."""


class TokenFile(Credentials):
    """A bearer token in a file that another program rotates; `token` is used until the file can be read."""

    def __init__(
        self,
        path: str,
        *,
        token: str = "",
        headers: Headers = (),
        field: str = "the service account's",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(headers, f"the token in {path}")
        self._field = field
        self.files = (path,)
        self._path = path
        self._token = token
        self._clock = clock
        self._read_at: float | None = None

    async def headers(self) -> Headers:
        """Return the headers with the file's token; read the file at most once in TOKEN_LIFETIME seconds."""
        if self._read_at is None or self._clock() - self._read_at >= TOKEN_LIFETIME:
            self._read()
        return (*self._fixed, bearer(self._token))

    def invalidate(self, used: Headers) -> None:
        """Make the next request read the file."""
        if bearer(self._token) in used:
            self._read_at = None

    def _read(self) -> None:
        try:
            token = check_token(Path(self._path).read_text(encoding="utf-8", errors="replace").strip())
            if not token:  # another program is writing the file
                raise ValueError("it is empty")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if not self._token:
                raise SourceError(f"the token file {self._path} ({self._field}) cannot be used: {why}") from error
            log.warning("Keeping the last token, because %s cannot be used: %s", self._path, why)
        else:
            self._token = token
        self._read_at = self._clock()


class ExecEnv(Struct, frozen=True):
    """One variable of an exec plugin's environment."""

    name: str
    value: str = ""


class ExecConfig(Struct, frozen=True, rename="camel"):
    """users[].user.exec of a kubeconfig."""

    api_version: str = ""
    command: str = ""
    args: list[str] | None = None
    env: list[ExecEnv] | None = None
    interactive_mode: str | None = None
    provide_cluster_info: bool | None = None
    install_hint: str | None = None


class _ExecStatus(Struct, rename="camel"):
    expiration_timestamp: str | None = None
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None


class _ExecCredential(Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: _ExecStatus | None = None


class ExecPlugin(Credentials):
    """A program that prints an ExecCredential (client.authentication.k8s.io/v1 or v1beta1), which is used until it
    expires or the server refuses it. At most one process of the program runs at a time, without a terminal. `config` is
    the entry in the kubeconfig, and `field` is the entry's path. `cluster` is None without provideClusterInfo."""

    def __init__(
        self, config: ExecConfig, field: str, cluster: dict[str, Any] | None = None, *, headers: Headers = ()
    ) -> None:
        super().__init__(headers, f"the output of {field}.command {config.command}")
        self.program = config.command
        self._config = config
        self._field = field
        self._cluster = cluster
        self._status: _ExecStatus | None = None
        self._expires: float | None = None
        self._lock = asyncio.Lock()

    async def headers(self) -> Headers:
        """Return the headers with the plugin's token, if any."""
        status = await self._current()
        return self._headers_of(status)

    async def key_pair(self) -> KeyPair | None:
        """Return the plugin's client certificate, if any."""
        status = await self._current()
        if status.client_certificate_data and status.client_key_data:
            return KeyPair(status.client_certificate_data.encode(), status.client_key_data.encode())
        return None

    def invalidate(self, used: Headers) -> None:
        """Make the next request run the plugin, unless the plugin has run after `used` was returned."""
        if self._status is not None and self._headers_of(self._status) == used:
            self._status = None

    def _headers_of(self, status: _ExecStatus) -> Headers:
        return (*self._fixed, bearer(status.token)) if status.token else self._fixed

    async def _current(self) -> _ExecStatus:
        async with self._lock:
            expired = self._expires is not None and time.time() >= self._expires - _EXPIRY_MARGIN
            if self._status is None or expired:
                self._status = self._decode(await self._run())
                self._expires = None
                with suppress(ValueError):
                    self._expires = datetime.fromisoformat(self._status.expiration_timestamp or "").timestamp()
            return self._status

    async def _run(self) -> bytes:
        config = self._config
        info = {"apiVersion": config.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        if self._cluster is not None:
            info["spec"] = {"interactive": False, "cluster": self._cluster}
        env = {**os.environ, **{entry.name: entry.value for entry in config.env or ()}}
        env["KUBERNETES_EXEC_INFO"] = msgspec.json.encode(info).decode()
        loop, pipe = asyncio.get_running_loop(), asyncio.subprocess.PIPE
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(_READ_AHEAD, loop),
                config.command,
                *(config.args or ()),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            hint = f"; {config.install_hint.strip()}" if config.install_hint else ""
            why = error.strerror if isinstance(error, OSError) else error
            raise SourceError(f"{self._field}: {config.command} cannot be run: {why}{hint}") from error
        process = Process(transport, protocol, loop)
        try:
            async with asyncio.timeout(EXEC_TIMEOUT):
                output, complaint = await self._printed(process)
                await process.wait()
        except TimeoutError as error:
            await _end(process, transport)
            raise SourceError(f"{self._field}: {config.command} did not end within {EXEC_TIMEOUT:.0f} s") from error
        except BaseException:
            await _end(process, transport)
            raise
        if process.returncode:
            # Redact before the cut, which may remove the word before a secret.
            last = redact(complaint.decode("utf-8", "replace").strip()[-LINE:])[-500:]
            raise SourceError(f"{self._field}: {config.command} failed with exit code {process.returncode}: {last}")
        return output

    async def _printed(self, process: Process) -> tuple[bytes, bytes]:
        assert process.stdout is not None  # noqa: S101 - both are pipes
        assert process.stderr is not None  # noqa: S101
        last = asyncio.create_task(_end_of(process.stderr))
        try:
            output = bytearray()
            while data := await process.stdout.read(_READ_AHEAD):
                output += data
                if len(output) > LONGEST:
                    raise SourceError(f"{self._field}: {self._config.command} printed more than {LONGEST} bytes")
            return bytes(output), await last
        finally:
            last.cancel()

    def _decode(self, output: bytes) -> _ExecStatus:
        field = self._field
        try:
            credential = msgspec.json.decode(output, type=_ExecCredential)
            check_token((credential.status and credential.status.token) or "")
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{field}: the plugin printed no usable ExecCredential: {error}") from error
        if credential.api_version != self._config.api_version or credential.kind != "ExecCredential":
            got = f"{credential.api_version} {credential.kind}".strip()[:100]
            raise SourceError(f"{field}: the plugin printed {got!r}, not an ExecCredential {self._config.api_version}")
        status = credential.status
        if status is None or not (status.token or (status.client_certificate_data and status.client_key_data)):
            raise SourceError(f"{field}: the plugin gave neither a token nor a client certificate with its key")
        return status


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while data := await stream.read(_READ_AHEAD):
        kept = (kept + data)[-_READ_AHEAD:]
    return kept


async def _end(process: Process, transport: asyncio.SubprocessTransport) -> None:
    """Kill a plugin and its children, and stop reading its output, which other processes may keep open."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(PermissionError):
        transport.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT):  # a process of another user cannot be killed
            await process.wait()


def bearer(token: str) -> tuple[str, str]:
    """Return the header that carries a token."""
    return "Authorization", f"Bearer {token}"


def check_token(token: str) -> str:
    """Return `token` if it is valid in a header. Raises ValueError, without quoting the token."""
    if any(ord(char) < 33 or ord(char) > 126 for char in token):
        raise ValueError("the token has characters that are invalid in a header")
    return token
