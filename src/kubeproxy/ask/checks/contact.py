"""Checks of the API server: the connection, the expiry of certificates and tokens, the difference of clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import structs

from kubeproxy.api.cluster import Validity
from kubeproxy.api.source import STALE, Reach, WatchStanding
from kubeproxy.ask.finding import MISLEADS, NOTHING, Diagnosis, Severity, duration

QUIET: Final = 60.0  # seconds for which a missing watch is normal; a new list after an error takes less time
SILENT: Final = 20.0  # seconds without bytes from the server after which an answer contains a note
SLOW: Final = 1.0  # maximum seconds until a healthy server answers
SKEW: Final = 30.0
"""The maximum normal difference of clocks in seconds. A small difference is harmless, because certificates and tokens
are issued some seconds before their first use."""
_SOON: Final = {"client": 7 * 86400.0, "authority": 30 * 86400.0, "server": 7 * 86400.0, "token": 300.0}
"""A certificate is reported if it expires within this many seconds; automatic renewal happens much earlier."""
_LAST_PART: Final = 0.1
"""A short-lived certificate that expires soon gets only a note while more than this fraction of its lifetime is left. A
kubelet renews its certificate when a tenth is left."""

_NEEDED: Final = frozenset({"services", "endpointslices"})
"""The resources that must be listed before the proxy writes any rule."""
_NO_NODE: Final = (
    "this Node is unknown: for 30 seconds after its start the proxy writes no rules, then it continues without the "
    "Node's addresses, zone and podCIDRs"
)
_NO_CIDRS: Final = (
    "the proxy works as in a cluster without ServiceCIDRs: nftables mode does not drop packets to cluster IPs that no "
    "Service has"
)
_NAMES: Final = {
    "client": "the kubeconfig's client certificate",
    "authority": "the kubeconfig's certificate authority",
    "server": "the API server's certificate",
    "token": "the service account's token",
}
_RENEWALS: Final = {
    "client": "renew the certificate; the proxy reads a replaced file of client-certificate without a restart, and the "
    "kubeconfig itself only at the start",
    "authority": "rotate the cluster's authority, and add the new authority to the kubeconfig in addition to the "
    "old authority",
    "server": "renew the API server's certificate (kubeadm certs renew apiserver)",
    "token": "in a pod, read in the kubelet's log why the kubelet does not renew the token, or restart the pod; "
    "outside a pod, write a valid token into the kubeconfig's tokenFile",
}


def reached(reach: Reach, began: Mapping[str, float] = {}, quiet: float = QUIET) -> Iterator[Diagnosis]:
    """Check whether the server answers, and whether the watches deliver changes of every resource. `began` is
    Facts.began; up to `quiet` seconds without a watch are not reported, unless the server refused the request."""
    age = max((one.stale for one in reach.watched if one.synced and one.resource in _NEEDED), default=0.0)
    known = f"state known {duration(age)} ago" if age > quiet else "last known state"
    effect = f"traffic uses the {known}; changes of Services and endpoints do not arrive"
    if any(one.resource in _NEEDED and not one.synced for one in reach.watched):
        effect = "no Service is known yet, and this process has written nothing; any rules of a previous process remain"
    if reach.trouble:
        what = "gives no answer" if _SILENT in reach.trouble else "cannot be reached"
        yield Diagnosis(
            severity=Severity.BROKEN,
            about="api",
            what=f"the API server {what} at {reach.trouble}",
            why=effect,
            fix=_fix_for(reach.trouble)
            or f"make {reach.server} reachable from this node: check the server's address and state, and the "
            f"firewalls between",
            harm=MISLEADS,
            since=began.get("api", 0.0),
        )
        return
    troubled: dict[str, list[WatchStanding]] = {}
    for one in reach.watched:
        if not (one.connected or (one.synced and one.stale <= quiet and not _fix_for(one.trouble))):
            # There is one finding per fix, for all resources that need this fix.
            cause = _fix_for(one.trouble) or (one.trouble and f"{one.trouble} {one.resource}")
            troubled.setdefault(cause, []).append(one)
    for several in troubled.values():
        one = max(several, key=lambda each: (not each.synced, each.stale))
        names = ", ".join(each.resource for each in several)
        what = f"no watch of {names} for {duration(one.stale)}"
        if not one.synced:
            what = f"no list of {names} has arrived for {duration(one.stale)}"
        what += f": {one.trouble.removeprefix(f'{one.resource}: ')}" if one.trouble else ""
        severity = Severity.BROKEN if not one.synced or one.stale > STALE else Severity.DEGRADED
        why, harm = effect, MISLEADS
        if not any(each.resource in _NEEDED for each in several):
            served = not any(each.resource in _NEEDED for many in troubled.values() for each in many)
            why = f"changes of {names} do not arrive" + "; changes of Services and endpoints arrive" * served
            harm = NOTHING
            if any(each.resource == "nodes" and not each.synced for each in several):
                why = _NO_NODE
        fix = _fix_for_expired(reach, one.trouble) or _fix_for(one.trouble) or "look at the API server's health and log"
        yield Diagnosis(severity, "api", what, why, fix, harm)
    yield from _silent_watches(reach, quiet)


def _silent_watches(reach: Reach, quiet: float) -> Iterator[Diagnosis]:
    if silent := [one for one in reach.watched if one.connected and one.stale > quiet]:
        names, age = ", ".join(one.resource for one in silent), max(one.stale for one in silent)
        what = f"no message of the open watches of {names} for {duration(age)}"
        why = "the server sends a message every minute: the connections may be dead; the proxy soon lists again"
        fix = "if this happens again, look at the load balancer or proxy between this node and the API server"
        yield Diagnosis(Severity.NOTE, "api", what, why, fix)
    for one in reach.watched:
        if one.connected and one.trouble:
            what = f"no list of {one.resource}: {one.trouble.removeprefix(f'{one.resource}: ')}"
            yield Diagnosis(Severity.DEGRADED, "api", what, _NO_CIDRS, _fix_for(one.trouble), NOTHING)


def _fix_for_expired(reach: Reach, trouble: str) -> str:
    now = time.time()
    expired = [name for name in ("token", "client") if name in reach.certificates and reach.certificates[name][1] < now]
    return _RENEWALS[expired[0]] if expired and _fix_for(trouble) == _CREDENTIALS else ""


def hopeless(reach: Reach) -> bool:
    """Return whether no list can arrive before an operator corrects the kubeconfig, the rights or the server."""
    if _fix_for(reach.trouble) and not any(words in reach.trouble for words in _PASSING):
        return True
    missing = [one for one in reach.watched if one.resource in {*_NEEDED, "nodes"} and not one.synced]
    return bool(missing) and all(_fix_for(one.trouble) for one in missing)


def unread(reach: Reach | None, trouble: str) -> Diagnosis:
    """Return the reason why no object could be read with a kubeconfig; `trouble` is the reason if `reach` contains
    none."""
    for finding in reached(reach) if reach is not None else ():
        watched = reach.watched if reach is not None else ()
        missing = ", ".join(one.resource for one in watched if not one.synced)
        some = any(one.synced for one in watched)
        return structs.replace(finding, why=f"without {missing} nothing else can be checked" if some else _UNREAD)
    fix = "name a kubeconfig with which `kubectl --kubeconfig FILE get services` answers"
    return Diagnosis(severity=Severity.BROKEN, about="api", what=trouble, why=_UNREAD, fix=fix)


def outdated(reach: Reach, began: Mapping[str, float] = {}) -> Iterator[Diagnosis]:
    """Check whether Services or endpoints may be outdated. QUIET seconds without the server are an error, SILENT
    seconds a note."""
    needed = [one for one in reach.watched if one.resource in _NEEDED]
    is_old = any(one.stale > QUIET or not one.synced for one in needed)
    if not is_old and all(one.stale <= SILENT for one in needed):
        return
    for one in reached(reach, began, QUIET if is_old else SILENT):
        if one.harm != NOTHING or one.severity is Severity.NOTE:
            yield one if is_old else structs.replace(one, severity=Severity.NOTE, harm=NOTHING)


_UNREAD: Final = "no object of the cluster can be read, so Services and this Node cannot be checked"
_REFUSED_CREDENTIALS: Final = "(code 401)"  # texts of StatusError
_CREDENTIALS: Final = (
    "the API server does not accept the kubeconfig's token or certificate: write a valid token or certificate of "
    "this cluster into the kubeconfig; the proxy reads a replaced token file without a restart, and a changed "
    "kubeconfig after a restart"
)
_RESTART: Final = "; then restart the proxy, which reads its kubeconfig only at the start"
_SCHEME: Final = (
    f"let the kubeconfig's server (or --master) begin with https, because the server's port uses TLS{_RESTART}"
)
_UNRESOLVED: Final = "the name cannot be resolved"  # texts from api.status and api.connection
_CLOSED: Final = "must the server's URL begin with https?"
_SILENT: Final = "sent nothing for"
_PASSING: Final = (_UNRESOLVED, _CLOSED, _SILENT)
"""Errors that may be temporary. A name server or API server may be slow, or may restart and answer in plain HTTP."""
_BUSY: Final = "look at the health, the load and the log of the API server and of etcd, and for lost packets on the way"
_FIXES: Final = {
    _REFUSED_CREDENTIALS: _CREDENTIALS,
    "does not accept our credentials": _CREDENTIALS,
    "the token file": "write a valid token into this file of the node, or correct the kubeconfig's field that names "
    "the file; the proxy reads the file again without a restart",
    "(code 403)": "bind the identity of the kubeconfig to the ClusterRole of this kube-proxy (kube-proxy-py in "
    "deploy/kustomize, or system:node-proxier), which may list and watch these resources",
    "certificate is not signed by": "put the authority that signed the server's certificate into the kubeconfig "
    f"(certificate-authority): `kubectl config view --raw` of a kubeconfig that works has it{_RESTART}",
    "certificate is not for": "set the kubeconfig's server to an address in the server's certificate, or "
    f"tls-server-name to a name in the certificate{_RESTART}",
    "certificate has expired": _RENEWALS["server"],
    "does not speak TLS": f"correct scheme, address and port of the kubeconfig's server{_RESTART}",
    "server's URL must begin with https": _SCHEME,
    "HTTP request to an HTTPS server": _SCHEME,  # net/http of Go
    "HTTP request was sent to HTTPS port": _SCHEME,  # nginx
    _CLOSED: "see whether its port speaks TLS: then have the kubeconfig's server (or --master) begin with https; else "
    "look at the server's log",
    _SILENT: f"the server accepts connections, so address and port are right: {_BUSY}",
    _UNRESOLVED: "correct the host of the kubeconfig's server (or --master), or see why this node does not resolve it: "
    "`getent hosts NAME`, /etc/resolv.conf, and the name server there; the cluster's DNS does not answer before this "
    "proxy has written rules, so give an address or a name of the node's own DNS",
}


def _fix_for(trouble: str) -> str:
    return next((fix for words, fix in _FIXES.items() if words in trouble), "")


def expiring(certificates: Mapping[str, Validity], now: float) -> Iterator[Diagnosis]:
    """Check the expiry of certificates and tokens, which are named client, authority, server and token."""
    for name, (begins, end) in certificates.items():
        left = end - now
        if left > _SOON[name]:
            continue
        when = f"expired {duration(-left)} ago" if left <= 0 else f"expires in {duration(left)}"
        kind = "token" if name == "token" else "certificate"
        why = f"without a valid {kind} no changes arrive from the API server after the connection ends"
        severity = Severity.BROKEN if left <= 0 else Severity.DEGRADED
        if left > _LAST_PART * (end - begins):
            if name == "token":
                continue
            severity, when = Severity.NOTE, f"{when}, and is valid for {duration(end - begins)} in all"
        yield Diagnosis(severity, "certificates", f"{_NAMES[name]} {when}", why, _RENEWALS[name])


def answered(seconds: float) -> Iterator[Diagnosis]:
    """Check the time until the API server's answer to one request."""
    if seconds > SLOW:
        what = f"the API server is slow: it answered after {seconds:.1f} s"
        why, fix = "changes of Services and endpoints arrive late", f"{_BUSY}; this proxy needs no restart"
        yield Diagnosis(Severity.DEGRADED, "api", what, why, fix)


def agreeing(skew: float) -> Iterator[Diagnosis]:
    """Check the difference of clocks; `skew` is the API server's clock minus this node's clock, in seconds."""
    if abs(skew) > SKEW:
        which = "behind" if skew > 0 else "ahead of"
        what = f"this node's clock is {duration(abs(skew))} {which} the API server's"
        why = "certificates and tokens count as expired, or as not yet valid; times in logs and events do not agree"
        fix = "set the clock, and let chrony or systemd-timesyncd synchronise the clock"
        yield Diagnosis(Severity.DEGRADED, "clock", what, why, fix)
