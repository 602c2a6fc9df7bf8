"""Differences between the modes that a client can see. Each mode declares its own; answers about packets use them."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FrontendKind


class Affinity(Enum):
    """The scope of session affinity: a client keeps its endpoint within it."""

    SERVICE_PORT = "a service port"
    POLICY = "a service port, apart by internal and external traffic policy"
    ADDRESS = "an address of a service port"


class Habits(NamedTuple):
    """Differences between the modes that a client can see.

    `refuses_ports`: kinds of addresses whose other ports are refused. `drops_unowned`: addresses of ServiceCIDRs that
    no Service has are dropped. `refuses_node`: this node's own connections to external addresses without endpoints are
    refused like all others, not routed. `ranges_first`: source ranges apply to a Service
    without endpoints as well. `resets_tcp`: families in which TCP is refused by a reset, in place of an ICMP error.
    `loopback`: families in which NodePorts always answer on loopback, where they answer on all local addresses.
    `closes_everywhere`: a NodePort without endpoints is refused or dropped on all local addresses, those included on
    which NodePorts do not answer. `one_pool`: under policy Local, pods and this node get the endpoints of this node as
    clients from outside do, where it has any. `carries`: the proxy relays the bytes, and endpoints see its address.
    `carries_sctp`: SCTP is served, and not refused. `affinity`: its scope. `outlives_mode`:
    connections go on when another mode takes over. `hairpins`: the endpoints that are masqueraded when they reach
    themselves.
    """

    refuses_ports: tuple[FrontendKind, ...] = (FrontendKind.CLUSTER,)
    drops_unowned: bool = True
    refuses_node: bool = True
    ranges_first: bool = True
    resets_tcp: tuple[Family, ...] = (Family.IPV4,)
    loopback: tuple[Family, ...] = ()
    closes_everywhere: bool = False
    one_pool: bool = False
    carries: bool = False
    carries_sctp: bool = True
    affinity: Affinity = Affinity.SERVICE_PORT
    outlives_mode: bool = True
    hairpins: Literal["of this node", "all"] = "of this node"
