"""Client of a running proxy's unix socket. Blocking: for commands, never for the proxy itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from kubeproxy.control.listener import LENGTH, connect, server
from kubeproxy.errors import NoAnswerError, QuestionError
from kubeproxy.release import SAME_BUILD

T = TypeVar("T")

TIMEOUT = 10.0  # timeout of a request in seconds


class _Connection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path, TIMEOUT)


class Client:
    """Sends requests to the proxy whose socket is at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ask(self, page: str, kind: type[T], **parameters: str) -> T:
        """Send a request and return its answer. Raises NoAnswerError or QuestionError."""
        response = self._request(page, list(parameters.items()))
        with _reading():
            return msgspec.msgpack.decode(response.read(), type=kind)

    def stream(self, page: str, kind: type[T], parameters: list[tuple[str, str]]) -> Iterator[T]:
        """Yield the parts of a long answer as they arrive. Raises NoAnswerError or QuestionError."""
        response = self._request(page, parameters)
        decoder = msgspec.msgpack.Decoder(kind)
        with _reading():
            while head := response.read(LENGTH):
                yield decoder.decode(response.read(int.from_bytes(head, "big")))

    def pid(self) -> int:
        """Return the proxy's pid in the caller's namespace; 0 if no proxy answers."""
        try:
            return server(self.path) or 0
        except OSError:
            return 0

    def _request(self, page: str, parameters: list[tuple[str, str]]) -> HTTPResponse:
        connection = _Connection(self.path)
        query = f"?{urlencode(parameters)}" if parameters else ""
        try:
            connection.request("GET", page + query, headers={"Connection": "close"})
            response = connection.getresponse()
            if response.status != 200:
                raise QuestionError(response.read().decode(errors="replace").strip())
        except (OSError, HTTPException) as error:
            raise NoAnswerError(self._trouble(error)) from error
        return response

    def _trouble(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return (
                f"no kube-proxy answers at {self.path}: ask where it runs (from anywhere: `kubectl kubeproxy COMMAND "
                "--node NODE`; else `kubectl exec` into its pod on this node), give its --control-socket, or do "
                "without one by --manifests or --kubeconfig"
            )
        if isinstance(error, PermissionError):
            return f"{self.path}: only root may ask; use sudo"
        if isinstance(error, TimeoutError):
            return f"the proxy at {self.path} did not answer within {TIMEOUT:.0f} s: see its log and /livez"
        return f"the proxy at {self.path} cannot be asked: {getattr(error, 'strerror', None) or error}"


@contextmanager
def _reading() -> Iterator[None]:
    """Convert the errors of an incomplete or malformed answer to NoAnswerError."""
    try:
        yield
    except msgspec.MsgspecError as error:
        reason = f"the proxy's answer cannot be read ({error}), as it runs another version than this command"
        raise NoAnswerError(f"{reason}: {SAME_BUILD}") from error
    except (OSError, HTTPException) as error:
        raise NoAnswerError(f"the proxy's answer broke off: {error}") from error
