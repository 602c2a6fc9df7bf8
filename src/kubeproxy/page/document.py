"""The page: its HTML, style and scripts are files in site/, sent as one document.

Its Content-Security-Policy allows only the scripts and styles in the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kubeproxy.server.http import TEXT, Headers, Request, Response

SAFE: Final[Headers] = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
)
"""The headers of every answer below /ui."""
_HTML: Final[Headers] = (("Content-Type", "text/html; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
_PART: Final = rb"^\{\{([\w.]+)\}\}\n"
_INLINE: Final = rb"<%b(?:\s[^>]*)?>(.*?)</%b\s*>"


class Document:
    """The page, read at the first request."""

    def __init__(self) -> None:
        self._response: Response | None = None

    def handle(self, _: Request) -> Response:
        """Answer with the page."""
        if self._response is None:
            try:
                self._response = page(joined())
            except OSError as error:
                reason = f"a file of page/site cannot be read ({error.strerror}): install kube-proxy anew\n"
                return Response(404, TEXT, reason.encode())
        return self._response


def joined() -> bytes:
    """Return site/page.html with each line {{NAME}} replaced by the file of that name beside it. Raises OSError."""
    from importlib import resources  # noqa: PLC0415 - not loaded by a proxy without an open page

    site = resources.files(__package__).joinpath("site")
    html = site.joinpath("page.html").read_bytes()
    return re.sub(_PART, lambda found: site.joinpath(found[1].decode()).read_bytes(), html, flags=re.MULTILINE)


def page(html: bytes) -> Response:
    """Return a page's response; by their hashes only its own scripts and styles run."""
    policy = (
        "default-src 'none'",
        " ".join(["script-src", *(_hashes(html, b"script") or ["'none'"])]),
        " ".join(["style-src", *(_hashes(html, b"style") or ["'none'"])]),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Response(200, (*_HTML, ("Content-Security-Policy", "; ".join(policy))), html)


def _hashes(html: bytes, element: bytes) -> list[str]:
    """Return the hashes of the contents of all elements of a kind, in CSP's form."""
    return list(dict.fromkeys(_each(html, element)))


def _each(html: bytes, element: bytes) -> Iterator[str]:
    from base64 import b64encode  # noqa: PLC0415 - as above
    from hashlib import sha256  # noqa: PLC0415

    for found in re.finditer(_INLINE % (element, element), html, re.DOTALL | re.IGNORECASE):
        # A browser replaces CRLF by LF before it computes the hash.
        text = found[1].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        yield f"'sha256-{b64encode(sha256(text).digest()).decode()}'"
