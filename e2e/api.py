"""A client of the API server for the substitutes of DNS and load balancer; each request has a separate connection."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path
from typing import Any

from e2e.layout import API

Json = dict[str, Any]


class Api:
    """Sends requests as the administrator, from inside the hub's namespace."""

    def __init__(self, folder: Path) -> None:
        self._context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def get(self, path: str) -> Json:
        """Return an object or a list. Raises OSError (urllib.error.HTTPError for a refusal)."""
        return self._call("GET", path, None)

    def patch(self, path: str, patch: Json) -> None:
        """Apply a JSON merge patch. Raises OSError."""
        self._call("PATCH", path, patch)

    def _call(self, method: str, path: str, body: Json | None) -> Json:
        headers = {"Authorization": "Bearer admin", "Content-Type": "application/merge-patch+json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(API + path, data, headers, method=method)  # noqa: S310 - API is https
        with urllib.request.urlopen(request, context=self._context, timeout=5) as response:  # noqa: S310
            result: Json = json.load(response)
        return result
