"""Who may see the page of the metrics server, as --page-from and --page-hosts have it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from kubeproxy.config.addresses import Network, parse_cidr, parse_ip
from kubeproxy.config.durations import quote
from kubeproxy.errors import ConfigError

_LABEL: Final = r"[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


class PageAccess(NamedTuple):
    """The networks whose clients get the page, none for no page; `hosts` are names, in small letters, and addresses."""

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()


def page_access(networks: Sequence[str], hosts: Sequence[str]) -> PageAccess:
    """Return what the values of the flags mean. Raises ConfigError with a line for each mistake."""
    mistakes: list[str] = []
    found = [network for text in networks if (network := _network(text.strip(), mistakes)) is not None]
    names = [name for text in hosts if (name := _host(text.strip(), mistakes))]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return PageAccess(tuple(found), frozenset(names))


def _network(text: str, mistakes: list[str]) -> Network | None:
    network = parse_cidr(text)
    if network is None:
        address = parse_ip(text)
        hint = f"; for this address alone write {address}/{address.max_prefixlen}" if address is not None else ""
        mistakes.append(f"--page-from: {quote(text)} is no CIDR such as 10.0.0.0/8{hint}")
    return network


def _host(text: str, mistakes: list[str]) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = parse_ip(bare)
    if address is not None:
        return str(address)
    if not _NAME.fullmatch(bare) or len(bare) > 253:
        mistakes.append(
            f"--page-hosts: {quote(text)} is no name or IP address; expected node-a.example, say, no scheme and port"
        )
        return ""
    return bare.rstrip(".").lower()
