"""Access to the page: by the client's address, the name in Host, and the site for which a browser asks. Pure.

A browser sends requests for any web page that is open in it. What keeps those of others out: their own names stand in
Host, even when they resolve to our address (DNS rebinding), and the browser says for whom it asks.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from kubeproxy.config.addresses import Address, parse_ip
from kubeproxy.config.options import PageAccess
from kubeproxy.model.addresses import is_loopback
from kubeproxy.server.http import Request, host_name

_OWN_SITE: Final = frozenset(("", "same-origin", "none"))
"""Values of Sec-Fetch-Site: from a client that is no browser, from the page itself, and typed by the user."""


class Content(Enum):
    """What is asked for: the page, which says nothing of this node and may be linked to, or what it shows."""

    PAGE = "the page"
    STATE = "the state of the node"


def refusal(access: PageAccess, request: Request, content: Content) -> str | None:
    """Return why a request is not answered, None when it is."""
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
    """Return whether a Host's name can only be ours: localhost, loopback, the address that was asked, or listed."""
    if name == "localhost" or name in access.hosts:
        return True
    address = _address(name)
    if address is None:
        return False
    return is_loopback(address.packed) or address == _address(local) or str(address) in access.hosts


def _address(text: str) -> Address | None:
    """Return the parsed address, for an IPv4-mapped one the IPv4 address; None if the text is no address."""
    return parse_ip(text.partition("%")[0])
