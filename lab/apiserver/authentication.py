"""Authenticates requests: maps bearer tokens to users. Tokens can be added and revoked while the server runs."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping


def service_account(namespace: str, name: str) -> str:
    """Return the user name of a service account (serviceaccount.MakeUsername of kube-apiserver)."""
    return f"system:serviceaccount:{namespace}:{name}"


class Tokens:
    """Bearer tokens by user. `fixed` tokens never expire; `refused` counts the requests with an invalid token."""

    def __init__(self, fixed: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users = dict(fixed)
        self._ends: dict[str, float] = {}
        self.refused = 0

    def __bool__(self) -> bool:
        return bool(self._users)

    def issue(self, user: str) -> str:
        """Return a new token of a user, valid until end() refuses it."""
        token = secrets.token_urlsafe(32)
        self._users[token] = user
        return token

    def end(self, token: str, grace: float) -> None:
        """Refuse a token, `grace` seconds from now."""
        self._ends[token] = self._clock() + grace

    def user_of(self, authorization: str) -> str | None:
        """Return the user of an Authorization header, None without a valid token."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        user = self._users.get(token) if scheme.lower() == "bearer" else None
        if user is None or self._clock() >= self._ends.get(token, math.inf):
            self.refused += 1
            return None
        return user
