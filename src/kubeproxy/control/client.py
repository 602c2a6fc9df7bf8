"""The client of a running proxy's control socket. The client blocks, so only commands use it, never the proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final, TypeVar
from urllib.parse import urlencode

import msgspec

from kubeproxy.control.listener import LENGTH, connect, peer, server
from kubeproxy.errors import HALTED, HANGS, NO_PROXY, SILENT, NoAnswerError, QuestionError
from kubeproxy.kernel.proc import processes
from kubeproxy.release import different

T = TypeVar("T")

FIRST_TIMEOUT = 3.0  # timeout in seconds of requests before the first answer
TIMEOUT = 10.0  # timeout in seconds of later requests
HALTED_TIMEOUT = 0.5  # timeout in seconds of a request to a process that a signal or a debugger has stopped
NO_PAGE: Final = "404 page not found"  # the answer of server.http for an unknown path


class _Answering(msgspec.Struct):
    """The field of an answer to /facts that proxies of every version send."""

    version: str


class _Connection(HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost")
        self._path, self.seconds = path, seconds

    def connect(self) -> None:
        self.sock = connect(self._path, self.seconds)
        if processes.is_halted(peer(self.sock)):
            self.seconds = min(self.seconds, HALTED_TIMEOUT)
            self.sock.settimeout(self.seconds)


class Client:
    """Sends requests to the proxy that listens on the socket at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seconds = FIRST_TIMEOUT

    def ask(self, page: str, kind: type[T], **parameters: str) -> T:
        """Send a request; return the decoded answer. Raises NoAnswerError or QuestionError."""
        response = self._request(page, list(parameters.items()))
        with self._reading():
            return msgspec.msgpack.decode(response.read(), type=kind)

    def stream(self, page: str, kind: type[T], parameters: list[tuple[str, str]]) -> Iterator[T]:
        """Yield the parts of a long answer as they arrive. Raises NoAnswerError or QuestionError."""
        response = self._request(page, parameters)
        decoder = msgspec.msgpack.Decoder(kind)
        with self._reading():
            while head := response.read(LENGTH):
                yield decoder.decode(response.read(int.from_bytes(head, "big")))

    def pid(self) -> int:
        """Return the proxy's pid in the caller's namespace; 0 if no proxy answers."""
        try:
            return server(self.path) or 0
        except OSError:
            return 0

    def silence(self) -> str:
        """Return the error if a proxy runs, but does not answer in time; otherwise ''."""
        try:
            self.ask("/facts", _Answering)
        except (NoAnswerError, QuestionError) as error:
            return str(error) if isinstance(error, NoAnswerError) and error.kind in HANGS else ""
        return ""

    def _request(self, page: str, parameters: list[tuple[str, str]]) -> HTTPResponse:
        connection = _Connection(self.path, self._seconds)
        query = f"?{urlencode(parameters)}" if parameters else ""
        try:
            connection.request("GET", page + query, headers={"Connection": "close"})
            response = connection.getresponse()
            self._seconds = TIMEOUT
            if response.status != 200:
                text = response.read().decode(errors="replace").strip()
                if text == NO_PAGE:
                    raise NoAnswerError(self._other_build(f"the proxy has no page {page}"))
                raise QuestionError(text)
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._trouble(error, connection.seconds) from error
        return response

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert the errors of an incomplete or malformed answer to NoAnswerError."""
        try:
            yield
        except msgspec.MsgspecError as error:
            raise NoAnswerError(self._other_build(f"the proxy's answer cannot be read ({error})")) from error
        except (OSError, HTTPException) as error:
            raise NoAnswerError(f"the proxy's answer broke off: {error}") from error

    def _other_build(self, fault: str) -> str:
        """Return a fault with the version of the proxy, the version of this command, and the fix."""
        running = "unknown"
        with suppress(NoAnswerError, QuestionError, OSError, HTTPException, msgspec.MsgspecError):
            running = msgspec.msgpack.decode(self._request("/facts", []).read(), type=_Answering).version
        return f"{fault}: {different(running)}"

    def _trouble(self, error: Exception, seconds: float) -> NoAnswerError:
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            fix = (
                "run `kubectl kubeproxy COMMAND --node NODE`, or `kubectl exec` into the proxy's pod on this node; "
                "give the proxy's socket with --control-socket; or use no proxy, with --manifests or --kubeconfig"
            )
            return NoAnswerError(f"no kube-proxy answers at {self.path}", fix, kind=NO_PROXY)
        if isinstance(error, PermissionError):
            return NoAnswerError(f"{self.path}: only root may ask; use sudo")
        if isinstance(error, TimeoutError):
            # A proxy that a signal has stopped accepts no connection. If the socket's backlog is full, `pid` returns 0,
            # and each kube-proxy of this node is checked.
            pids = [pid] if (pid := self.pid()) else [one.pid for one in processes.proxies()]
            fact = f"the proxy at {self.path} did not answer within {seconds:g} s"
            if pid := next(filter(processes.is_halted, pids), 0):
                fix = f"a signal (SIGSTOP) or a debugger has stopped the proxy: `kill -CONT {pid}`"
                return NoAnswerError(fact, fix, kind=HALTED)
            return NoAnswerError(fact, "see the proxy's log and /livez", kind=SILENT)
        cause = getattr(error, "strerror", None) or error
        return NoAnswerError(f"the request to the proxy at {self.path} failed: {cause}")
