"""The headers with which a request acts as another user (kubeconfig `as`, `as-uid`, `as-groups`, `as-user-extra`).

Source: client-go's transport (which headers) and clientcmd (what goes together).
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Final

from kubeproxy.api.credentials import Headers
from kubeproxy.errors import ConfigError

# What a header's name may hold (RFC 9110, 5.6.2), but for the sign that begins an escape.
_LEGAL: Final = frozenset((string.ascii_letters + string.digits + "!#$&'*+-.^_`|~").encode())


def impersonation(
    user: str, uid: str, groups: Sequence[str], extra: Mapping[str, Sequence[str] | None], where: str
) -> Headers:
    """Return the headers; `where` is the path of the kubeconfig's user. Raises ConfigError that names the field."""
    if (uid or groups or extra) and not user:
        raise ConfigError(f"{where}.as: is missing; a uid, groups and extra can only be taken beside a user")
    wanted = [("as", "Impersonate-User", user), ("as-uid", "Impersonate-Uid", uid)]
    wanted += [(f"as-groups[{index}]", "Impersonate-Group", group) for index, group in enumerate(groups)]
    wanted += [
        (f"as-user-extra[{key}][{index}]", f"Impersonate-Extra-{_escaped(key)}", value)
        for key, values in extra.items()
        for index, value in enumerate(values or ())
    ]
    headers = []
    for field, name, value in wanted:
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"{where}.{field}: has characters that cannot stand in a header")
        if value or field.startswith("as-user-extra"):
            headers.append((name, value))
    return tuple(headers)


def _escaped(key: str) -> str:
    return "".join(chr(byte) if byte in _LEGAL else f"%{byte:02X}" for byte in key.encode())
