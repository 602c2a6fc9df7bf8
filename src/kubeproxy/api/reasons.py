"""Messages for operators about failed connections, made from Python's exceptions. Pure."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import Final, Protocol

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

# X.509 verification results of OpenSSL (x509_vfy.h).
_NOT_SIGNED: Final = frozenset((2, 18, 19, 20, 21))
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAMES: Final = frozenset((62, 64))  # another host name, another address

# Values of ssl.SSLError.reason, by their remedy.
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"))
_OURS_REFUSED: Final = re.compile(r"ALERT_(?:BAD_CERTIFICATE|UNKNOWN_CA|CERTIFICATE_\w+|UNSUPPORTED_CERTIFICATE)$")


class ConnectedServer(Protocol):
    """The parts of a connection that error messages name."""

    @property
    def identity(self) -> str:
        """The credentials that the server gets, in words."""

    @property
    def authorities(self) -> str:
        """The certificate authorities that its certificate must be signed by, in words."""

    @property
    def server_hostname(self) -> str | None:
        """The name that must be in its certificate."""


def os_reason(error: OSError) -> str:
    """Return the system's text of an error; Python and asyncio often have another one."""
    if isinstance(error, ssl.SSLError):
        return tls_words(error)
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: {error.strerror}"
    # asyncio has texts of its own, and quotes several errors in one that has no number.
    number = error.errno or next(map(int, _ERRNO.findall(str(error))), 0)
    if number == errno.ECONNREFUSED:
        return "connection refused"
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_words(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as words, without the library's name and line."""
    if reason := _code(error):
        return reason.replace("_", " ").lower()
    text = re.sub(r"^\[[^\]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return text or "unknown reason"


def _code(error: ssl.SSLError) -> str:
    return getattr(error, "reason", None) or ""  # missing where Python itself raised it


def connection_reason(error: OSError, cluster: ConnectedServer) -> str:
    """Return why no connection to the server of `cluster` was made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_reason(error, cluster)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the connection was closed during the TLS handshake"
    if isinstance(error, ssl.SSLError):
        reason = _code(error)
        if reason in _NO_TLS:
            return "what listens there does not speak TLS: is the server's URL https, and its port right?"
        if _OURS_REFUSED.search(reason):
            return f"the server does not accept our credentials ({cluster.identity}): {tls_words(error)}"
        return f"TLS failed: {tls_words(error)}"
    return os_reason(error)


def _certificate_reason(error: ssl.SSLCertVerificationError, cluster: ConnectedServer) -> str:
    code = error.verify_code
    if code in _NOT_SIGNED:
        return f"the server's certificate is not signed by {cluster.authorities}"
    if code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet: compare the clocks of the server and of this node"
    if code == _EXPIRED:
        return "the server's certificate has expired, or the clock of this node is wrong"
    if code in _OTHER_NAMES:
        name = cluster.server_hostname
        return f"the server's certificate is not for {name}: give an address that is in it, or tls-server-name"
    return f"the server's certificate is refused: {error.verify_message}"
