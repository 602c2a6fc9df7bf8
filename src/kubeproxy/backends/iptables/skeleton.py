"""The chains that all Services share, the jumps to these chains, the settings of all rules, and names of chains. Pure.
The names are those of the Go kube-proxy, so that tools and runbooks work unchanged, and each of the two proxies can
take over from the other. Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go iptablesJumpChains, syncProxyRules,
portProtoHash and servicePortEndpointChainName."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from kubeproxy.backends.rules import Jump, pods_in_iptables
from kubeproxy.model.addresses import PROTOCOLS, Family, is_loopback, unpack
from kubeproxy.model.plan import FamilyGlobals, Globals, ServicePortKey

Place = tuple[str, str]
"""A table and a chain."""

LOCALHOST_COUNTER: Final = "localhost_nps_accepted_pkts"
INVALID_COUNTER: Final = "ct_state_invalid_dropped_pkts"

CANARY: Final = "KUBE-PROXY-CANARY"
CANARY_TABLES: Final = ("mangle", "nat", "filter")
KUBELET_FIREWALL: Final = "KUBE-FIREWALL"
MARTIANS: Final = (
    f"-A {KUBELET_FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 "
    '-m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""The rule that drops packets from other hosts to loopback, which route_localnet admits (kubernetes issue 90259).
Kubelet writes the same rule."""

_NEW: Final = "-m conntrack --ctstate NEW "
_LAST: Final = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


_EXTERNAL: Final = "kubernetes externally-visible service portals"
_PORTALS: Final = "kubernetes service portals"
_BALANCERS: Final = "kubernetes load balancer firewall"
JUMPS: Final = (
    Jump("filter", "INPUT", "KUBE-EXTERNAL-SERVICES", _EXTERNAL, _NEW),
    Jump("filter", "FORWARD", "KUBE-EXTERNAL-SERVICES", _EXTERNAL, _NEW),
    Jump("filter", "INPUT", "KUBE-NODEPORTS", "kubernetes health check service ports"),
    Jump("filter", "FORWARD", "KUBE-SERVICES", _PORTALS, _NEW),
    Jump("filter", "OUTPUT", "KUBE-SERVICES", _PORTALS, _NEW),
    Jump("filter", "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
    Jump("filter", "INPUT", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("filter", "OUTPUT", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("filter", "FORWARD", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("nat", "OUTPUT", "KUBE-SERVICES", _PORTALS),
    Jump("nat", "PREROUTING", "KUBE-SERVICES", _PORTALS),
    Jump("nat", "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
    Jump("filter", "INPUT", KUBELET_FIREWALL),
    Jump("filter", "OUTPUT", KUBELET_FIREWALL),
)
"""Jumps to our chains, in the order of insertion at the beginning of the built-in chains."""


OWN_CHAINS: Final = frozenset({jump.target for jump in JUMPS} | {CANARY, "KUBE-MARK-MASQ"})
"""Our chains that Services share."""

NAT_SERVICES: Final = ("nat", "KUBE-SERVICES")
NAT_NODEPORTS: Final = ("nat", "KUBE-NODEPORTS")
SHARED: Final[tuple[Place, ...]] = (
    ("filter", "KUBE-SERVICES"),
    ("filter", "KUBE-EXTERNAL-SERVICES"),
    ("filter", "KUBE-NODEPORTS"),
    ("filter", "KUBE-PROXY-FIREWALL"),
    NAT_SERVICES,
    NAT_NODEPORTS,
)
"""The shared chains with rules of Services, in the order of writing."""


class SharedChain(NamedTuple):
    """The rules of a shared chain: blocks of lines in any order, and the last lines."""

    blocks: Sequence[str]
    last: str = ""

    @property
    def text(self) -> str:
        """Return all rules."""
        return "".join(self.blocks) + self.last


class StartOptions(NamedTuple):
    """Settings from the configuration and the node, read once at the start. `localhost_nodeports` is the configured
    value; `liberal` is nf_conntrack_tcp_be_liberal; `counters`: whether the kernel has named packet counters (None if
    unknown)."""

    localhost_nodeports: bool
    liberal: bool
    counters: bool | None


class RuleSettings(NamedTuple):
    """The inputs of a family's rules, without the Services. `nodeport_ips` is None for all local addresses; `if_local`
    is the match for traffic of pods, or '' if there is none."""

    family: Family
    options: StartOptions
    mark: int
    nodeport_ips: tuple[bytes, ...] | None
    if_local: str

    @classmethod
    def of(cls, family: Family, world: Globals, options: StartOptions) -> RuleSettings:
        """Return the settings of a family. Raises ConfigError for an interface name that cannot be used in a rule."""
        ours = world.of(family) or FamilyGlobals()
        return cls(family, options, world.masquerade_mark, ours.nodeport_ips, pods_in_iptables(ours.detector))

    @property
    def localhost(self) -> bool:
        """Return whether NodePorts answer on loopback."""
        if self.family is not Family.IPV4 or not self.options.localhost_nodeports:
            return False
        return self.nodeport_ips is None or any(map(is_loopback, self.nodeport_ips))

    @property
    def localhost_counter(self) -> bool:
        """Return whether NodePort connections to loopback are counted."""
        return bool(self.options.counters) and self.localhost

    @property
    def prefix_length(self) -> int:
        """Return the prefix length of a network with one address."""
        return 8 * self.family.address_size

    def is_like(self, other: RuleSettings) -> bool:
        """Return whether two settings give the same rules for all Services. A change of the NodePort addresses changes
        only one shared chain, which the next sync writes."""
        return self.localhost == other.localhost and self._replace(nodeport_ips=other.nodeport_ips) == other


def fixed_chains(settings: RuleSettings) -> dict[Place, SharedChain]:
    """Return the chains without rules of Services."""
    mark = f"{settings.mark:#x}"
    counted = f" -m nfacct --nfacct-name {INVALID_COUNTER}" if settings.options.counters else ""
    # Packets in conntrack's state INVALID would reach a client untranslated, and end the connection (issue 74839).
    invalid = "" if settings.options.liberal else f"-A KUBE-FORWARD -m conntrack --ctstate INVALID{counted} -j DROP\n"
    forward = invalid + (
        f'-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT\n'
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" '
        "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
    )
    postrouting = (
        f"-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN\n"
        # The rule clears the mark, so that a packet that passes the network stack a second time is not masqueraded
        # again.
        f"-A KUBE-POSTROUTING -j MARK --xor-mark {mark}\n"
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" '
        "-j MASQUERADE --random-fully\n"
    )
    return {
        ("nat", "KUBE-POSTROUTING"): SharedChain([postrouting]),
        ("nat", "KUBE-MARK-MASQ"): SharedChain([f"-A KUBE-MARK-MASQ -j MARK --or-mark {mark}\n"]),
        ("filter", "KUBE-FORWARD"): SharedChain([forward]),
    }


def nodeport_rules(settings: RuleSettings) -> str:
    """Return the jumps to KUBE-NODEPORTS, which are the last rules of KUBE-SERVICES."""
    rule = f'-m comment --comment "{_LAST}"'
    if settings.nodeport_ips is not None:
        length = settings.prefix_length
        return "".join(
            [f"-A KUBE-SERVICES -d {unpack(ip)}/{length} {rule} -j KUBE-NODEPORTS\n" for ip in settings.nodeport_ips]
        )
    but = "! -d ::1/128 " if settings.family is Family.IPV6 else "" if settings.localhost else "! -d 127.0.0.0/8 "
    return f"-A KUBE-SERVICES {but}{rule} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"


PROTOCOL_WORDS: Final = {number: name.lower() for name, number in PROTOCOLS.items()}

SVC: Final = "KUBE-SVC-"
SVL: Final = "KUBE-SVL-"
EXT: Final = "KUBE-EXT-"
FW: Final = "KUBE-FW-"
SEP: Final = "KUBE-SEP-"
SERVICE_PREFIXES: Final = (FW, "KUBE-XLB-", EXT, SVL, SVC, SEP)
"""Prefixes of Services' chains, in the order of jumps. KUBE-XLB- is the prefix of EXT chains before Kubernetes 1.24."""

COPY: Final = f"{SEP}AUDIT-"
"""Prefix of the copies of chains that an audit writes: no Service's chain has this prefix."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567".ljust(256)  # RFC 4648
_HASHED: Final = 10  # used bytes of a digest, which give 16 characters of five bits
_AT_ONCE: Final = 64


def _lower_halves(bits: int, lane: int) -> int:
    """Return a mask for _AT_ONCE hashes: in every second lane of `lane` bits, the lowest `bits` bits are 1."""
    return sum(((1 << bits) - 1) << at for at in range(0, _AT_ONCE * 128, 2 * lane))


_HALVINGS: Final = tuple(
    (bits, lane, _lower_halves(bits, lane)) for bits, lane in ((40, 64), (20, 32), (10, 16), (5, 8))
)
"""The steps that spread the bits of many hashes at once for base32. First each lane of 128 bits contains 80 bits; each
step divides each lane into two, until each byte contains five bits."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9./:_-]{0,200}")
_ODD: Final = re.compile(r"[^A-Za-z0-9./:_-]")


def chain_hashes(texts: Sequence[str]) -> list[str]:
    """Return the first 16 base32 characters of each text's SHA-256. One call with ten texts takes as long as two calls
    with one text."""
    found: list[str] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        digests = [sha256(text).digest()[:_HASHED] for text in _encoded(some)]
        bits = int.from_bytes(bytes(16 - _HASHED).join(digests), "big")
        for width, lane, mask in _HALVINGS:
            bits = (bits & mask) | ((bits >> width & mask) << lane)
        text = bits.to_bytes(16 * len(some), "big").translate(_ALPHABET).decode()
        found += [text[at : at + 16] for at in range(0, len(text), 16)]
    return found


def _encoded(texts: Sequence[str]) -> list[bytes]:
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:  # a manifest contains half of a surrogate pair
        return [text.encode(errors="surrogatepass") for text in texts]


def port_name(key: ServicePortKey) -> str:
    """Return a service port as the Go kube-proxy writes it: namespace/name:port, or namespace/name if the port has no
    name."""
    return f"{key.namespace}/{key.name}:{key.port_name}" if key.port_name else f"{key.namespace}/{key.name}"


def comment(text: str) -> str:
    """Return a text from a user without characters that are unsafe in a rule's quoted comment. Names that the API
    server accepts are not changed. Other names, for example from a folder of manifests, lose the characters that could
    end the comment or the line, and are cut, because iptables refuses comments above 255 bytes."""
    return text if _PLAIN.fullmatch(text) else _ODD.sub("_", text[:200])
