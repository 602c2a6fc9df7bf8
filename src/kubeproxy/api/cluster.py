"""The address, TLS settings and credentials of an API server, from a kubeconfig or a service account. Also reads the
validity periods in certificates and tokens, because Python's ssl module does not return the period of a client
certificate."""

from __future__ import annotations

import logging
import os
import re
import ssl
from base64 import b64decode, urlsafe_b64decode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kubeproxy.api.credentials import Credentials, KeyPair
from kubeproxy.api.status import os_reason, tls_code, tls_words
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import host_port

log = logging.getLogger("kubeproxy.api")


class Server(NamedTuple):
    """The parts of a server's URL; `prefix` is the path before /api, without a slash at the end."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """host:port in the form of a Host header; an IPv6 address is in brackets."""
        return host_port(self.host, self.port)

    @property
    def url(self) -> str:
        """The normalised URL, always with a port."""
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_server(text: str, field: str, *, default_scheme: str = "http") -> Server:
    """Parse the URL of an API server. A 'host:port' without a scheme gets `default_scheme`, as in client-go's
    DefaultServerURL. For an invalid URL, raises ConfigError with a text that starts with `field`."""
    if "@" in text:  # the message does not quote the URL, which may contain a password
        raise ConfigError(
            f"{field}: the URL must not hold a user name or a password; give them to the kubeconfig's user"
        )
    try:
        parts = urlsplit(text if "://" in text else f"{default_scheme}://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{field}: {text!r} is no URL: {error}") from error
    text = text.partition("?")[0]  # the rest of the URL may be a secret
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{field}: {text!r} is no server URL; give one such as https://10.0.0.1:6443")
    if any(ord(char) <= 32 or ord(char) > 126 for char in text):
        raise ConfigError(f"{field}: {text!r} has characters that a URL cannot have")
    return Server(
        parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
    )


class Trust(Struct, frozen=True, kw_only=True):
    """TLS settings: certificate authorities, client certificate and key, each as PEM data or a file."""

    ca_file: str = ""
    ca_data: bytes = b""
    certificate_file: str = ""
    certificate_data: bytes = b""
    key_file: str = ""
    key_data: bytes = b""
    insecure: bool = False
    server_name: str = ""
    cluster_field: str = "cluster"  # path of the cluster's settings in the kubeconfig, for messages
    user_field: str = "user"  # path of the user's settings in the kubeconfig, for messages

    @property
    def authorities(self) -> str:
        """The field or file with the certificates of the authorities, for messages."""
        if self.ca_data:
            return f"{self.cluster_field}.certificate-authority-data"
        return self.ca_file or f"an authority of this system; set {self.cluster_field}.certificate-authority"

    @property
    def own_certificate(self) -> str:
        """The field or file with the client certificate, for messages; '' without a client certificate."""
        if self.certificate_data:
            return f"{self.user_field}.client-certificate-data"
        return self.certificate_file

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Return the path, mtime (ns) and size of each file; the result changes when a file is replaced."""
        return tuple(_file_state(path) for path in (self.ca_file, self.certificate_file, self.key_file) if path)

    def context(self, pair: KeyPair | None) -> ssl.SSLContext:
        """Build the TLS context; `pair` (from an exec plugin) takes precedence over the certificate of the settings.
        Raises ConfigError with the name of the wrong field and file."""
        context = self._authorities()
        # Python 3.13 refuses certificates without an authority key identifier, which Go accepts and clusters use.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        pair = pair or self._own_pair()
        if pair is not None:
            try:
                _load_pair(context, pair)
            except (ssl.SSLError, OSError, ValueError) as error:
                field = f"{self.user_field}.client-certificate"
                why = tls_words(error) if isinstance(error, ssl.SSLError) else error
                raise ConfigError(f"{field}: certificate and key cannot be used together: {why}") from error
        return context

    def _authorities(self) -> ssl.SSLContext:
        field = f"{self.cluster_field}.certificate-authority"
        try:
            if self.ca_data:
                return ssl.create_default_context(cadata=self.ca_data.decode("ascii"))
            return ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ValueError) as error:
            source = "-data" if self.ca_data else f" {self.ca_file}"
            why = os_reason(error) if isinstance(error, OSError) else "the content is not text"
            raise ConfigError(f"{field}{source}: holds no usable certificates: {why}") from error

    def validities(self, pair: KeyPair | None) -> dict[str, Validity]:
        """Return the validity of the client certificate ("client") and of the authority that expires last
        ("authority"). An unknown period is omitted. `pair` has the same meaning as in `context`. Raises ConfigError."""
        authorities = b""
        if not self.insecure:
            authorities = self.ca_data or read_file(self.ca_file, f"{self.cluster_field}.certificate-authority")
        pair = pair or self._own_pair()
        known = {"authority": validities(authorities), "client": validities(pair.certificate)[:1] if pair else []}
        # During a rotation, the old authority and its successor are both present.
        return {name: max(each, key=attrgetter("ends")) for name, each in known.items() if each}

    def _own_pair(self) -> KeyPair | None:
        certificate = self.certificate_data or read_file(self.certificate_file, f"{self.user_field}.client-certificate")
        key = self.key_data or read_file(self.key_file, f"{self.user_field}.client-key")
        if not certificate and not key:
            return None
        if not certificate or not key:
            missing = "client-key" if certificate else "client-certificate"
            raise ConfigError(f"{self.user_field}.{missing}: is missing; a client certificate needs both parts")
        return KeyPair(certificate, key)


class Proxy(NamedTuple):
    """The address of an HTTP proxy, and its header Proxy-Authorization ('' for none), which no message contains."""

    scheme: str
    host: str
    port: int
    authorization: str = ""

    def __repr__(self) -> str:
        return f"{self.scheme}://{host_port(self.host, self.port)}"

    def headers(self) -> list[str]:
        """Return the header lines for the proxy."""
        return [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []


class Cluster:
    """An API server: its address, the HTTP proxy in front of it, TLS settings and credentials."""

    def __init__(self, server: Server, trust: Trust, credentials: Credentials, proxy: Proxy | None = None) -> None:
        self.server = server
        self.proxy = proxy
        self.credentials = credentials
        self._trust = trust
        self._context: ssl.SSLContext | None = None
        self._made_of: object = None
        self._unusable = ""
        self.certificates: Mapping[str, Validity] = {}  # for the certificates in use; keys as in Trust.validities
        self._on_expiries: Callable[[Mapping[str, float]], None] = lambda _: None
        if server.scheme == "https":
            self._made_of = (trust.signature(), None)
            self._context = trust.context(None)
            self.certificates = trust.validities(None)

    @property
    def authorities(self) -> str:
        """The field or file with the certificates of the authorities, for messages."""
        return self._trust.authorities

    @property
    def files(self) -> tuple[str, ...]:
        """The files (certificates, keys, tokens) that are read again after a change."""
        return (*(path for path, _, _ in self._trust.signature()), *self.credentials.files)

    @property
    def identity(self) -> str:
        """The kind of the credentials and the field or file that contains them, for messages."""
        own = f"the client certificate in {self._trust.own_certificate}" if self._trust.own_certificate else ""
        return self.credentials.name or own or "none are given"

    @property
    def server_hostname(self) -> str | None:
        """The name that the server's certificate must contain, also sent as SNI; None without TLS."""
        return None if self._context is None else self._trust.server_name or self.server.host

    @property
    def expiries(self) -> dict[str, float]:
        """The expiries of the certificates in use, in seconds since the epoch, with the keys of Trust.validities."""
        return {name: validity.ends for name, validity in self.certificates.items()}

    def on_certificates(self, expiries: Callable[[Mapping[str, float]], None]) -> None:
        """Call `expiries` now and after each rotation, with the expiries of the certificates in use."""
        self._on_expiries = expiries
        expiries(self.expiries)

    async def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for a new connection; None for http. After a rotation of certificates the context is
        new. (client-go with the gate ClientsAllowCARotation also reads new files, within five minutes.)"""
        if self.server.scheme != "https":
            return None
        pair = await self.credentials.key_pair()
        made_of = (self._trust.signature(), pair)
        if made_of != self._made_of:
            try:
                self._context = self._trust.context(pair)
                self.certificates = self._trust.validities(pair)
                self._made_of = made_of
                self._unusable = ""
                self._on_expiries(self.expiries)
            except ConfigError as error:
                # The files may be replaced one after the other, so the next connection reads them again.
                if self._unusable != str(error):
                    self._unusable = str(error)
                    log.warning("Keeping the present TLS settings, because the new settings cannot be read: %s", error)
        return self._context


def _load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load a certificate and key through a memory file, so that the key is not written to a disk."""
    memory = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(pair.certificate.rstrip() + b"\n" + pair.key)
        # Without a password argument, OpenSSL would prompt at the terminal. Unencrypted keys ignore the password.
        context.load_cert_chain(f"/proc/self/fd/{memory}", password="")
    finally:
        os.close(memory)


def read_file(path: str, field: str) -> bytes:
    """Return the content of a file, b'' for the path ''. Raises ConfigError that names the field."""
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}") from error


def _file_state(path: str) -> tuple[str, int, int]:
    try:
        state = Path(path).stat()
    except OSError:
        return path, 0, 0
    return path, state.st_mtime_ns, state.st_size


_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----([^-]+)-----END CERTIFICATE-----")
# A Validity (RFC 5280, 4.1.2.5) in DER: two times, each UTCTime (0x17) or GeneralizedTime (0x18). Only numbers and the
# issuer's name precede the validity. If an issuer's name matches the pattern, only certificates of this issuer are
# misread.
_TIME: Final = rb"(?:\x17\x0d|\x18\x0f)(\d{12}(?:\d\d)?)Z"
_VALIDITY: Final = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)


class Validity(NamedTuple):
    """The first and the last second of validity, in seconds since the epoch."""

    begins: float
    ends: float


class _Claims(msgspec.Struct):
    exp: float
    iat: float = 0.0


def validities(pem: bytes) -> list[Validity]:
    """Return the validity of each readable certificate, in order."""
    found = []
    for block in _PEM.findall(pem):
        try:
            if match := _VALIDITY.search(b64decode(block)):
                found.append(Validity(_seconds(match[1]), _seconds(match[2])))
        except (ValueError, OverflowError):
            continue
    return found


def token_validity(token: str) -> Validity | None:
    """Return the validity of a JSON Web Token (RFC 7519, 4.1); None for any other token, or without expiry."""
    parts = token.strip().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)), type=_Claims)
    except ValueError:
        return None
    return Validity(claims.iat, claims.exp)


def _seconds(digits: bytes) -> float:
    text = digits.decode()
    if len(text) == 12:  # UTCTime: the year has two digits
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


# X.509 verification results of OpenSSL (x509_vfy.h).
_NOT_SIGNED: Final = frozenset((2, 18, 19, 20, 21))
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAMES: Final = frozenset((62, 64))  # 62: the certificate is for another host name; 64: for another address

# Values of ssl.SSLError.reason, grouped by their fix.
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"))
_OURS_REFUSED: Final = re.compile(r"ALERT_(?:BAD_CERTIFICATE|UNKNOWN_CA|CERTIFICATE_\w+|UNSUPPORTED_CERTIFICATE)$")


def connection_reason(error: OSError, cluster: Cluster) -> str:
    """Return the reason why a connection to the server of `cluster` failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_reason(error, cluster)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the connection was closed during the TLS handshake"
    if isinstance(error, ssl.SSLError):
        reason = tls_code(error)
        if reason in _NO_TLS:
            return "the server at this address does not use TLS: is the URL's scheme https, and its port right?"
        if _OURS_REFUSED.search(reason):
            return f"the server does not accept our credentials ({cluster.identity}): {tls_words(error)}"
        return f"TLS failed: {tls_words(error)}"
    return os_reason(error)


def _certificate_reason(error: ssl.SSLCertVerificationError, cluster: Cluster) -> str:
    code = error.verify_code
    if code in _NOT_SIGNED:
        return f"the server's certificate is not signed by {cluster.authorities}"
    if code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet: compare the clocks of the server and of this node"
    if code == _EXPIRED:
        return "the server's certificate has expired, or the clock of this node is wrong"
    if code in _OTHER_NAMES:
        name = cluster.server_hostname
        return f"the server's certificate is not for {name}: use an address in the certificate, or tls-server-name"
    return f"the server's certificate is refused: {error.verify_message}"
