"""Access to the page: by the client's address, the Host header, and the site that a browser names. Pure.

A browser sends requests on behalf of any web page that is open in it. Requests of other sites are recognised by two
headers: Host has the other site's name, even if it resolves to our address (DNS rebinding), and Sec-Fetch-Site and
Origin name the requesting site.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from kubeproxy.config.addresses import Address, parse_ip
from kubeproxy.config.options import PageAccess
from kubeproxy.model.addresses import is_loopback
from kubeproxy.server.http import Request, host_name

_OWN_SITE: Final = frozenset(("", "same-origin", "none"))
"""Accepted values of Sec-Fetch-Site: none (not a browser), of the page itself, and of an address that a user typed."""


class Content(Enum):
    """The requested content: the page, which has no data of this node and may be linked to, or the node's data."""

    PAGE = "the page"
    STATE = "the state of the node"


def refusal(access: PageAccess, request: Request, content: Content) -> str | None:
    """Return the reason why a request is refused, None if it is allowed."""
    peer = _address(request.peer)
    if peer is None or not any(peer in network for network in access.networks):
        return (
            f"this page is not for clients at {request.peer}: come by loopback, as with kubectl port-forward or "
            "ssh -L, or add their network to --page-from"
        )
    name = host_name(request.host)
    if not _is_known(name, request.local, access):
        return (
            f"this page is not asked for by the name {name!r} (against DNS rebinding): use localhost, or add the name "
            "to --page-hosts"
        )
    if content is Content.STATE:
        if request.origin and request.origin.lower().partition("://")[2] != request.host.lower():
            return f"this is for the page of this proxy alone, not for pages of {request.origin}"
        if request.site not in _OWN_SITE:
            return "this is for the page of this proxy alone, not for pages of another site"
    return None


def _is_known(name: str, local: str, access: PageAccess) -> bool:
    """Return whether a Host's name is ours: localhost, loopback, the connection's local address, or in --page-hosts."""
    if name == "localhost" or name in access.hosts:
        return True
    address = _address(name)
    if address is None:
        return False
    return is_loopback(address.packed) or address == _address(local) or str(address) in access.hosts


def _address(text: str) -> Address | None:
    """Return the parsed address, for an IPv4-mapped one the IPv4 address; None if the text is no address."""
    return parse_ip(text.partition("%")[0])
