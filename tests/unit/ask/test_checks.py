"""Findings of doctor: a row has the facts, and the severity and beginning of each finding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.api import lists
from kubeproxy.api.cluster import Validity
from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask.checks import checkup, contact, greeting, identity, ports, programming, settings, strangers
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.checks.settings import InterfacePath, Setting
from kubeproxy.ask.finding import MISLEADS, Diagnosis, Severity, duration, worst_first
from kubeproxy.backends.mode import FlowsEnd, Mode, Trace
from kubeproxy.config.load import read_text
from kubeproxy.config.types import KubeProxyConfiguration, made_strict
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.errors import SourceError
from kubeproxy.kernel.chains import RuleChain
from kubeproxy.kernel.proc.processes import Descriptors, ProxyProcess
from kubeproxy.kernel.route import Bridge, NetworkInterface
from kubeproxy.meaning.firewall import Filter, ForeignTranslation, PassingPacket
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from kubeproxy.release import build
from kubeproxy.setup import modes

V4, V6 = Family.IPV4, Family.IPV6
BROKEN, DEGRADED, NOTE = Severity.BROKEN, Severity.DEGRADED, Severity.NOTE
ENDPOINTS, PROXY = FlowsEnd.ENDPOINTS, FlowsEnd.PROXY
DAY = 86400.0
YEAR = 365 * DAY
PLAIN = "Client sent an HTTP request to an HTTPS server. (code 400)"


def watched(resource="services", synced=True, connected=True, stale=0.0, trouble=""):
    return WatchStanding(resource=resource, synced=synced, connected=connected, stale=stale, trouble=trouble)


def reach(*each, trouble=""):
    return Reach(server="https://10.0.0.1:6443", trouble=trouble, watched=each, certificates={})


def node(*addresses, cidrs=()):
    entries = [NodeAddress(kind, address) for kind, address in addresses]
    return Node(ObjectMeta("a"), NodeSpec(pod_cidrs=list(cidrs)), NodeStatus(entries))


def left(name, seconds, life=YEAR):
    return {name: Validity(1000.0 + seconds - life, 1000.0 + seconds)}


def link(name, up=True, running=True):
    return NetworkInterface(2, name, True, up, running)


NOT_ACCEPTED = "the API server does not accept our credentials (token of /t): Unauthorized (code 401)"
ROLES = {"eth0": "the Node's address 10.0.0.2", "cbr0": "the address 10.244.0.1 of the pod network"}


@pytest.mark.parametrize(
    ("trouble", "fix", "useless"),
    [
        (PLAIN, "let the kubeconfig's server (or --master) begin with https", True),
        ("h:80: closed: must the server's URL begin with https?", "see whether its port speaks TLS", False),
        ("h:80: not HTTP, but TLS: the server's URL must begin with https", "let the kubeconfig's server", True),
        ("api.example:6443: the name cannot be resolved: Name or service not known", "correct the host", False),
        ("h:6443: sent nothing for 30 s", "the server accepts connections, so address and port are right", False),
    ],
)
def test_a_wrong_server_gets_its_fix(trouble, fix, useless):
    found = reach(watched(synced=False, connected=False, stale=9), trouble=trouble)
    assert next(contact.reached(found)).fix.startswith(fix)
    assert contact.hopeless(found) is useless


@pytest.mark.parametrize(("ends", "fix"), [(0.0, "in a pod, read in the kubelet"), (9e9, "the API server does not")])
def test_refused_credentials_that_have_expired_are_renewed(ends, fix):
    refused = watched(connected=False, stale=90, trouble=NOT_ACCEPTED)
    found = replace(reach(refused), certificates={"token": Validity(0.0, ends)})
    assert next(contact.reached(found)).fix.startswith(fix)


def test_a_kubeconfig_is_read_again_after_a_restart():
    untrusted = reach(watched(), trouble="h:6443: the server's certificate is not signed by /ca.crt")
    assert next(contact.reached(untrusted)).fix.endswith(
        "restart the proxy, which reads its kubeconfig only at the start"
    )


CASES: dict = {
    "api answers": (contact.reached(reach(watched())), []),
    "api gone": (
        contact.reached(reach(watched(connected=False, stale=900), trouble="10.0.0.1:6443: refused")),
        [(BROKEN, "the API server cannot be reached at 10.0.0.1:6443: refused")],
    ),
    "api accepts connections and does not answer": (
        contact.reached(reach(watched(), trouble="10.0.0.1:6443: sent nothing for 10 s")),
        [(BROKEN, "the API server gives no answer at 10.0.0.1:6443: sent nothing for 10 s")],
    ),
    "api slow": (contact.answered(3.02), [(DEGRADED, "the API server is slow: it answered after 3.0 s")]),
    "api quick": (contact.answered(0.9), []),
    "between two watches": (contact.reached(reach(watched(connected=False, stale=59))), []),
    "refused credentials, at once": (
        contact.reached(reach(watched(connected=False, stale=3, trouble=NOT_ACCEPTED))),
        [(DEGRADED, f"no watch of services for 3 seconds: {NOT_ACCEPTED}")],
    ),
    "watch lost": (
        contact.reached(reach(watched(connected=False, stale=61, trouble="403"), watched("nodes"))),
        [(DEGRADED, "no watch of services for 61 seconds: 403")],
    ),
    "watch lost for long": (
        contact.reached(reach(watched(connected=False, stale=301))),
        [(BROKEN, "no watch of services for 5 minutes")],
    ),
    "never listed": (
        contact.reached(reach(watched("nodes", synced=False, connected=False, stale=3))),
        [(BROKEN, "no list of nodes has arrived for 3 seconds")],
    ),
    "nothing listed just after the start": (
        contact.reached(
            reach(*[watched(name, synced=False, connected=False, stale=2) for name in ("services", "servicecidrs")])
        ),
        [(BROKEN, "no list of services, servicecidrs has arrived for 2 seconds")],
    ),
    "a token that the server does not accept": (
        contact.reached(
            reach(
                *[
                    watched(name, synced=False, connected=False, stale=9, trouble="Unauthorized (code 401)")
                    for name in ("services", "nodes")
                ]
            )
        ),
        [(BROKEN, "no list of services, nodes has arrived for 9 seconds: Unauthorized (code 401)")],
    ),
    "a token that the server does not accept, as the watches of a server report it": (
        contact.reached(
            reach(
                *[
                    watched(name, synced=False, connected=False, stale=9, trouble=f"{name}: {NOT_ACCEPTED}")
                    for name in ("services", "endpointslices", "nodes", "servicecidrs")
                ]
            )
        ),
        [
            (
                BROKEN,
                "no list of services, endpointslices, nodes, servicecidrs has arrived for 9 seconds: " + NOT_ACCEPTED,
            )
        ],
    ),
    "rights that are missing for several resources": (
        contact.reached(
            reach(
                *[
                    watched(name, connected=False, stale=90, trouble=f'{name} is forbidden: User "x" (code 403)')
                    for name in ("services", "nodes")
                ]
            )
        ),
        [(DEGRADED, 'no watch of services, nodes for 90 seconds: services is forbidden: User "x" (code 403)')],
    ),
    "http to a port of TLS": (
        contact.reached(
            reach(
                *[
                    watched(name, synced=False, connected=False, stale=9, trouble=PLAIN)
                    for name in ("services", "nodes")
                ]
            )
        ),
        [(BROKEN, f"no list of services, nodes has arrived for 9 seconds: {PLAIN}")],
    ),
    "certificate lasts": (contact.expiring(left("client", 30 * DAY), 1000.0), []),
    "certificate ends": (
        contact.expiring(left("client", 6 * DAY), 1000.0),
        [(DEGRADED, "the kubeconfig's client certificate expires in 6 days")],
    ),
    "certificate that is renewed each day": (
        contact.expiring(left("client", 0.3 * DAY, DAY), 1000.0),
        [(NOTE, "the kubeconfig's client certificate expires in 7 hours, and is valid for 24 hours in all")],
    ),
    "certificate that was not renewed": (
        contact.expiring(left("client", 0.09 * DAY, DAY), 1000.0),
        [(DEGRADED, "the kubeconfig's client certificate expires in 2 hours")],
    ),
    "authority ended": (
        contact.expiring(left("authority", -7200.0), 1000.0),
        [(BROKEN, "the kubeconfig's certificate authority expired 2 hours ago")],
    ),
    "token is renewed in time": (contact.expiring(left("token", 400, 3600), 1000.0), []),
    "token was not renewed": (
        contact.expiring(left("token", 200, 3600), 1000.0),
        [(DEGRADED, "the service account's token expires in 3 minutes")],
    ),
    "clocks agree": (contact.agreeing(-29.0), []),
    "clock behind": (contact.agreeing(600.0), [(DEGRADED, "this node's clock is 10 minutes behind the API server's")]),
    "clock ahead": (contact.agreeing(-45.0), [(DEGRADED, "this node's clock is 45 seconds ahead of the API server's")]),
    "sound": (
        programming.standing([FamilyStanding(V4, sound_since=1.0), FamilyStanding(V6, sound_since=1.0, queued=3)]),
        [],
    ),
    "refused": (
        programming.standing(
            [FamilyStanding(V4, refusal="No space left on device", queued=2), FamilyStanding(V6, sound_since=1.0)]
        ),
        [(BROKEN, "the kernel refuses changes of IPv4: No space left on device")],
    ),
    "changed by others": (
        programming.standing([FamilyStanding(V6, difference="the chain services is missing")]),
        [(DEGRADED, "another program changed rules of IPv6: the chain services is missing")],
    ),
    "never sound": (
        programming.standing([FamilyStanding(V4)]),
        [(DEGRADED, "the proxy has never confirmed that the kernel has all IPv4 rules")],
    ),
    "not ready": (programming.unready({"api": "no list"}), [(BROKEN, "the proxy is not ready: no list")]),
    "table there": (programming.there([Trace("table", V4), Trace("table", V6)], (V4, V6), "nftables"), []),
    "interface for both": (programming.there([Trace("interface", None)], (V4, V6), "ipvs"), []),
    "table gone": (
        programming.there([Trace("table", V4)], (V4, V6), "nftables"),
        [(BROKEN, "nothing of nftables mode is in the kernel for IPv6")],
    ),
    "same version": (programming.versions("1", "1", 0.0, 9.0), []),
    "old version": (
        programming.versions("1", "2", 0.0, 3 * DAY),
        [(NOTE, "the proxy runs version 1 for 3 days, this command is 2")],
    ),
    "able": (programming.able("", BROKEN, ""), []),
    "able in one": (
        programming.able("ip6tables is missing: install iptables", DEGRADED, "Services are served by IPv4 alone"),
        [(DEGRADED, "ip6tables is missing")],
    ),
    "unable": (
        programming.able("nft is missing: install nftables", BROKEN, "the proxy does not start"),
        [(BROKEN, "nft is missing")],
    ),
    "does not forward": (
        [settings.forwarding(V4)],
        [(BROKEN, "net.ipv4.ip_forward is 0")],
    ),
    "every interface forwards": (settings.entrances(V4, [], BROKEN), []),
    "interfaces do not forward": (
        settings.entrances(V4, ["eth0", "eth1.7", "a", "b"], BROKEN),
        [(BROKEN, "net.ipv4.conf.eth0.forwarding, net.ipv4.conf.eth1/7.forwarding and 2 more are 0")],
    ),
    "an interface does not forward": (
        settings.entrances(V4, ["eth0"], NOTE),
        [(NOTE, "net.ipv4.conf.eth0.forwarding is 0")],
    ),
    "unreadable": (settings.changed_back([Setting("net/ipv4/vs/conntrack", 1, None)]), []),
    "changed back": (
        settings.changed_back([Setting("net/ipv4/vs/conntrack", 1, 0)]),
        [(DEGRADED, "net.ipv4.vs.conntrack is 0, it should be 1")],
    ),
    "larger table": (settings.changed_back([Setting("net/netfilter/nf_conntrack_max", 100, 200)]), []),
    "smaller table": (
        settings.changed_back([Setting("net/netfilter/nf_conntrack_max", 200, 100)]),
        [(DEGRADED, "net.netfilter.nf_conntrack_max is 100, it should be 200")],
    ),
    "strict filter": (settings.filtered_ways([InterfacePath("eth0", "10.0.0.1", "eth0", True)]), []),
    "strict filter, no way out": (settings.filtered_ways([InterfacePath("eth0", "10.0.0.1", "", True)]), []),
    "strict filter in the way": (
        settings.filtered_ways(
            [InterfacePath("eth0", "10.0.0.1", "eth1", True), InterfacePath("eth2", "10.2.0.1", "eth1", False)]
        ),
        [
            (DEGRADED, "net.ipv4.conf.eth0.rp_filter is strict (1), but answers from 10.0.0.1 on eth0 leave by eth1"),
            (NOTE, "net.ipv4.conf.eth2.rp_filter is strict (1)"),
        ],
    ),
    "bridge passes": (settings.bridged([Bridge("cni0", (V4, V6))], [("cni0", V4), ("cni0", V6)], ENDPOINTS), []),
    "bridge of others": (settings.bridged([Bridge("docker0", ())], [("eth0", V4)], ENDPOINTS), []),
    "bridge does not pass": (
        settings.bridged([Bridge("cni0", (V6,))], [("cni0", V4), ("cni0", V6)], ENDPOINTS),
        [(BROKEN, "net.bridge.bridge-nf-call-iptables is off, and pods of this node are on the bridge cni0")],
    ),
    "bridge need not pass": (settings.bridged([Bridge("cni0", ())], [("cni0", V4)], PROXY), []),
    "room": (settings.filled(settings.tracked(79, 100), "conntrack"), []),
    "no limit": (settings.filled(settings.tracked(79, 0), "conntrack"), []),
    "filling": (
        settings.filled(settings.tracked(80, 100), "conntrack"),
        [(DEGRADED, "connection tracking is 80% full: 80 of 100")],
    ),
    "full": (
        settings.filled(settings.tracked(95, 100), "conntrack"),
        [(BROKEN, "connection tracking is 95% full: 95 of 100")],
    ),
    "a table is not called full while it has room": (
        settings.filled(settings.tracked(262_139, 262_144, ()), "conntrack"),
        [(BROKEN, "connection tracking is 99% full: 262139 of 262144")],
    ),
    "few files": (settings.opened(Descriptors(10, 100), 7), []),
    "many files": (
        settings.opened(Descriptors(80, 100), 7),
        [(DEGRADED, "the proxy (pid 7) has 80 open files; its limit is 100")],
    ),
    "known": (identity.registered(node(), "a", "a"), []),
    "unknown": (identity.registered(None, "a", "b"), [(BROKEN, "there is no Node a")]),
    "own address": (identity.addressed(node(("InternalIP", "10.0.0.1")), {pack("10.0.0.1")}), []),
    "own address among others": (
        identity.addressed(node(("InternalIP", "fd00::1"), ("InternalIP", "10.0.0.1")), {pack("10.0.0.1")}),
        [],
    ),
    "address of a cloud": (identity.addressed(node(("ExternalIP", "203.0.113.1")), {pack("10.0.0.1")}), []),
    "no address": (
        identity.addressed(node(("Hostname", "a")), set()),
        [(DEGRADED, "Node a has no InternalIP and no ExternalIP")],
    ),
    "another one's address": (
        identity.addressed(node(("InternalIP", "10.0.0.2")), {pack("10.0.0.1")}),
        [(BROKEN, "Node a has the addresses 10.0.0.2, and this machine has none of these addresses")],
    ),
    "pod networks": (identity.networked(node(cidrs=["10.244.0.0/24"]), "NodeCIDR"), []),
    "a pod network with the Node's address": (
        identity.networked(node(("InternalIP", "10.0.0.1")), "ClusterCIDR", ["10.0.0.0/8"]),
        [(NOTE, "clusterCIDR 10.0.0.0/8 contains the Node's own address 10.0.0.1")],
    ),
    "pod networks that nobody asks for": (identity.networked(node(), "ClusterCIDR"), []),
    "pod networks in clusterCIDR": (
        identity.networked(node(cidrs=["10.244.0.0/24"]), "ClusterCIDR", ["10.244.0.0/16"], {pack("10.244.0.1")}),
        [],
    ),
    "pod networks that the node does not use": (
        identity.networked(node(cidrs=["10.244.0.0/24"]), "ClusterCIDR", ["10.99.0.0/16"], {pack("10.99.0.1")}),
        [],
    ),
    "pod networks beside clusterCIDR": (
        identity.networked(node(cidrs=["10.244.0.0/24"]), "ClusterCIDR", ["10.99.0.0/16"], {pack("10.244.0.1")}),
        [(BROKEN, "clusterCIDR 10.99.0.0/16 does not contain podCIDRs of this Node: 10.244.0.0/24")],
    ),
    "no pod networks": (
        identity.networked(node(), "NodeCIDR"),
        [(DEGRADED, "Node a has no podCIDRs, and detectLocalMode is NodeCIDR")],
    ),
    "file as it runs": (identity.configured("/c", "", ()), []),
    "file invalid": (
        identity.configured("/c", "/c: mode: expected", ()),
        [(DEGRADED, "the configuration file cannot be used: /c: mode: expected")],
    ),
    "file differs": (
        identity.configured("/c", "", ["mode: 1 -> 2", "x: 1 -> 2"]),
        [(DEGRADED, "/c differs from what runs: mode: 1 -> 2; x: 1 -> 2")],
    ),
    "ports": (
        ports.check([ports.ListeningPort("healthzBindAddress", ":1", True, (7, "kube-proxy"))], 7),
        [],
    ),
    "port of nobody": (
        ports.check([ports.ListeningPort("metricsBindAddress", ":1", False)], 7),
        [(DEGRADED, "metricsBindAddress: :1 is not the proxy's: nobody listens there")],
    ),
    "port of another": (
        ports.check([ports.ListeningPort("healthzBindAddress", ":1", True, (8, "nginx"))], 7),
        [(DEGRADED, "healthzBindAddress: :1 is not the proxy's: process nginx (pid 8) listens there")],
    ),
    "health check port of another": (
        ports.check([ports.ListeningPort("spec.healthCheckNodePort", ":1, :1", True, (8, "nginx"), "a/b")], 7),
        [
            (
                DEGRADED,
                "spec.healthCheckNodePort of a/b: :1, :1 is not the proxy's: process nginx (pid 8) listens there",
            )
        ],
    ),
    "NodePort of a process that is not visible": (
        ports.check([ports.ListeningPort("spec.ports[].nodePort", ":1", True, ports.HIDDEN, "a/b")], 7),
        [
            (
                DEGRADED,
                "spec.ports[].nodePort of a/b: :1 is not the proxy's: a process not visible here listens there",
            )
        ],
    ),
    "port of a process that hides": (
        ports.check([ports.ListeningPort("healthzBindAddress", ":1", True)], 7),
        [],
    ),
    "alone": (strangers.second([], "nftables"), []),
    "not alone": (
        strangers.second([(ProxyProcess(8, (), False), ""), (ProxyProcess(9, (), True), "ipvs")], "nftables"),
        [
            (BROKEN, "the Go kube-proxy runs here too (pid 8)"),
            (BROKEN, "another kube-proxy of this program runs here too (pid 9) in ipvs mode"),
        ],
    ),
    "leftovers": (
        strangers.left_over([Trace("interface kube-ipvs0", None)], "nftables"),
        [(DEGRADED, "left by another kube-proxy: interface kube-ipvs0")],
    ),
    "left over of both families": (
        strangers.left_over([Trace("table ip kube-proxy", V4), Trace("table ip6 kube-proxy", V6)], "iptables"),
        [(DEGRADED, "left by another kube-proxy: table ip kube-proxy, table ip6 kube-proxy")],
    ),
    "leftovers of the last one": (
        strangers.left_over([Trace("table ip kube-proxy", V4)], ""),
        [(DEGRADED, "rules without a proxy that answers: table ip kube-proxy")],
    ),
    "leftovers of the last one in both families": (
        strangers.left_over([Trace("table ip kube-proxy", V4), Trace("table ip6 kube-proxy", V6)], ""),
        [(DEGRADED, "rules without a proxy that answers: table ip kube-proxy, table ip6 kube-proxy")],
    ),
    "one variant": (
        strangers.both_variants(
            [RuleChain("nft", V4, "nat", "KUBE-SERVICES"), RuleChain("legacy", V4, "nat", "PREROUTING")]
        ),
        [],
    ),
    "a variant each": (
        strangers.both_variants(
            [RuleChain("nft", V4, "nat", "KUBE-SERVICES"), RuleChain("legacy", V6, "nat", "KUBE-SERVICES")]
        ),
        [],
    ),
    "both variants": (
        strangers.both_variants(
            [RuleChain("nft", V4, "nat", "KUBE-SERVICES"), RuleChain("legacy", V4, "nat", "KUBE-SVC-A")]
        ),
        [(DEGRADED, "both variants of iptables have a kube-proxy's IPv4 chains: 1 in legacy and 1 in nft")],
    ),
    "interfaces are up": (settings.down([link("eth0"), link("cbr0", running=False)], ROLES, {"cbr0"}), []),
    "uplink is down": (
        settings.down([link("eth0", up=False, running=False)], ROLES, ()),
        [(BROKEN, "eth0, which has the Node's address 10.0.0.2, is down")],
    ),
    "uplink has no carrier": (
        settings.down([link("eth0", running=False), link("eth1", up=False, running=False)], ROLES, ()),
        [(BROKEN, "eth0, which has the Node's address 10.0.0.2, has no carrier")],
    ),
    "bridge of pods is down": (
        settings.down([link("cbr0", up=False, running=False)], ROLES, {"cbr0"}),
        [(BROKEN, "cbr0, which has the address 10.244.0.1 of the pod network, is down")],
    ),
    "no firewall": (strangers.firewalls([], ENDPOINTS, False), []),
    "chain with kube-proxy's marks": (
        strangers.firewalls([Filter("t", "ip", "c", "forward", True, False, 0, marked=True)], ENDPOINTS, False),
        [(BROKEN, "t, chain c: drops all new connections that are not masqueraded at the hook forward")],
    ),
    "open chain": (strangers.firewalls([Filter("t", "ip", "c", "forward", False, False, 0)], ENDPOINTS, False), []),
    "closed chain": (
        strangers.firewalls([Filter("table ip t", "ip", "c", "forward", True, False, 0)], ENDPOINTS, False),
        [(BROKEN, "table ip t, chain c: drops all new connections at the hook forward")],
    ),
    "closed chain that lets some in": (
        strangers.firewalls([Filter("table ip t", "ip", "c", "forward", True, True, 0)], ENDPOINTS, False),
        [(NOTE, "table ip t may drop packets too: c at forward")],
    ),
    "what is for the node is no Service": (
        strangers.firewalls([Filter("table ip t", "ip", "c", "input", True, False, 0)], ENDPOINTS, False),
        [(NOTE, "table ip t may drop packets too: c at input")],
    ),
    "unless connections end here": (
        strangers.firewalls([Filter("table ip t", "ip", "c", "input", True, False, 0)], PROXY, False),
        [(BROKEN, "table ip t, chain c: drops all new connections at the hook input")],
    ),
    "or come in as the node's own": (
        strangers.firewalls([Filter("table ip t", "ip", "c", "input", True, False, 0)], ENDPOINTS, True),
        [(BROKEN, "table ip t, chain c: drops all new connections at the hook input")],
    ),
    "output is passed by this node's own connections alone": (
        strangers.firewalls([Filter("t", "ip", "c", "output", True, False, 1)], ENDPOINTS, False),
        [(NOTE, "t may drop packets too: c at output")],
    ),
    "untracked": (
        strangers.firewalls([Filter("t", "ip", "c", "prerouting", False, False, 0, untracks=True)], ENDPOINTS, False),
        [(NOTE, "t, chain c: takes packets out of connection tracking at the hook prerouting")],
    ),
    "untracked packets that no rule has to translate": (
        strangers.firewalls(
            [Filter("t", "ip", "c", "prerouting", False, False, 0, untracks=True)],
            ENDPOINTS,
            False,
            direct="10.244.0.9",
        ),
        [],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_findings_of_facts(case):
    made, wanted = case
    found = list(made)
    assert [(one.severity, one.what[: len(text)]) for one, (_, text) in zip(found, wanted, strict=True)] == wanted
    assert all(one.why and one.fix and one.about for one in found)


def test_missing_rules_of_one_family_concern_only_its_addresses():
    (found,) = programming.there([Trace("table", V6)], (V4, V6), "nftables")
    assert found.why == "no Service answers at its IPv4 addresses on this node"


def test_the_worst_comes_first():
    rows = [
        Diagnosis(severity=severity, about=about, what="w", why="y", fix="f")
        for severity, about in ((NOTE, "1"), (BROKEN, "2"), (DEGRADED, "3"), (BROKEN, "4"))
    ]
    assert [one.about for one in worst_first(rows)] == ["2", "4", "3", "1"]
    assert [one.is_wrong for one in worst_first(rows)] == [True, True, True, False]


@pytest.mark.parametrize(("name", "kind"), [("client", "certificate"), ("token", "token")])
def test_an_expired_token_is_not_called_a_certificate(name, kind):
    (found,) = contact.expiring(left(name, -60.0, 3600), 1000.0)
    assert found.why.startswith(f"without a valid {kind} no changes arrive")


@pytest.mark.parametrize(("used", "order"), [(96, ["conntrack", "api"]), (90, ["api", "conntrack"])])
def test_a_full_connection_table_comes_before_an_unreachable_api_server(used, order):
    unreachable = contact.reached(reach(watched(connected=False, stale=900), trouble="h:6443: timed out"))
    table = settings.filled(settings.tracked(used, 100, ()), "conntrack")
    assert [one.about for one in worst_first([*unreachable, *table])] == order


@pytest.mark.parametrize("used", [100, 99])
def test_a_full_connection_table_may_be_why_the_api_server_is_unreachable(used):
    unreachable = contact.reached(reach(watched(connected=False, stale=900), trouble="h:6443: timed out"))
    _, api = worst_first([*unreachable, *settings.filled(settings.tracked(used, 100, ()), "conntrack")])
    assert api.fix.startswith("first make room in connection tracking, which may be the cause; ") is (used == 100)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (7200, "2 hours"), (172800, "2 days")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("trouble", "fix"),
    [
        ("Unauthorized (code 401)", "does not accept the kubeconfig's token"),
        ('nodes is forbidden: User "x" cannot watch (code 403)', "ClusterRole of this kube-proxy"),
        ("10.0.0.1:6443: the server's certificate is not signed by /ca.crt", "certificate-authority"),
    ],
)
def test_the_fix_follows_from_the_cause(trouble, fix):
    (gone,) = contact.reached(reach(watched(), trouble=trouble))
    (refused,) = contact.reached(reach(watched(connected=False, stale=61, trouble=trouble)))
    assert fix in gone.fix
    assert fix in refused.fix


@pytest.mark.parametrize(
    ("resource", "synced", "why"),
    [
        ("services", True, "traffic uses the last known state"),
        (
            "services",
            False,
            "no Service is known yet, and this process has written nothing; any rules of a previous process",
        ),
        ("endpointslices", False, "no Service is known yet"),
        ("nodes", False, "this Node is unknown: for 30 seconds after its start the proxy writes no rules"),
        ("nodes", True, "changes of nodes do not arrive; changes of Services and endpoints arrive"),
    ],
)
@pytest.mark.parametrize("trouble", ["", "10.0.0.1:6443: refused"])
def test_before_the_first_list_no_finding_mentions_a_last_known_state(resource, synced, why, trouble):
    lost = watched(resource, synced=synced, connected=False, stale=0 if trouble else 61)
    (found,) = contact.reached(reach(watched("servicecidrs"), lost, trouble=trouble))
    why = "traffic uses the last known state" if trouble and resource == "nodes" else why
    said = why.replace("last known state", "state known 61 seconds ago") if synced and not trouble else why
    assert found.why.startswith(said)


REFUSED = "x is forbidden (code 403)"


def test_service_cidrs_that_must_not_be_listed_are_reported():
    (found,) = contact.reached(reach(watched("services"), watched("servicecidrs", trouble=REFUSED)))
    assert (found.severity, found.what) == (Severity.DEGRADED, f"no list of servicecidrs: {REFUSED}")
    assert "does not drop packets to cluster IPs that no Service has" in found.why
    assert "ClusterRole" in found.fix


@pytest.mark.parametrize(
    ("resource", "seconds", "marks"),
    [("endpointslices", 15, ""), ("endpointslices", 30, "-"), ("endpointslices", 90, "x"), ("endpointslices", 900, "x"),
     ("nodes", 900, "")],
)  # fmt: skip
def test_refused_lists_make_only_answers_about_their_resource_uncertain(resource, seconds, marks):
    lost = watched(resource, connected=False, stale=seconds, trouble=REFUSED)
    found = list(contact.outdated(reach(watched("services"), lost)))
    assert "".join(one.severity.mark for one in found) == marks
    assert [one.harm == MISLEADS for one in found] == [marks == "x"] * len(marks)


def test_no_fix_removes_the_rules_of_a_stopped_proxy_without_naming_the_consequence():
    (stopped,) = strangers.left_over([Trace("table ip kube-proxy", V4)], "")
    (running,) = strangers.left_over([Trace("table ip kube-proxy", V4)], "iptables")
    assert stopped.fix.startswith("start the proxy again")
    assert "ends every Service" in stopped.fix
    assert "--cleanup" not in running.fix


OLD, NEW = (bytes((10, 0, 0, 2)), 80), (bytes((10, 0, 0, 3)), 80)


@pytest.mark.parametrize(
    ("ends", "sure", "mark", "text"),
    [
        ([NEW], True, "-", "translates 10.96.0.1:80 to 10.0.0.3:80 at the hook output: the objects have these"),
        (
            [OLD, NEW],
            True,
            "?",
            "to 10.0.0.2:80 or 10.0.0.3:80 at the hook output: in the objects, 10.96.0.1:80 has no endpoint 10.0.0.2",
        ),
        ([NEW], False, "?", "may translate 10.96.0.1:80 to 10.0.0.3:80"),
        ([(bytes((10, 0, 1, end)), 80) for end in range(12)], True, "?", "10.0.1.9:80 or 2 others at"),
    ],
)
def test_rules_that_translate_without_a_proxy_are_compared_with_the_endpoints(ends, sure, mark, text):
    target = bytes((10, 96, 0, 1))
    packet = PassingPacket("output", 0, 1, None, target, 6, 80, (target, 80), ("", "eth0"))
    (found,) = strangers.translating_now(
        [ForeignTranslation("table ip kube-proxy", "c", packet, tuple(ends), sure, unordered=False)], {NEW}, "until x, "
    )
    assert (found.severity.mark, found.about, text in found.text) == (mark, strangers.PRESENT, True), found.text
    assert found.text.startswith("until x, table ip kube-proxy, chain c: ")


def test_a_server_without_an_answer_is_one_finding(monkeypatch):
    def fail(*_):
        raise SourceError("10.0.0.1:6443: No route to host")

    monkeypatch.setattr(greeting, "greet", fail)
    cluster = SimpleNamespace(credentials=SimpleNamespace(files=(), program=""), proxy=None)
    monkeypatch.setattr(greeting, "_cluster", lambda _: cluster)
    state = reach(watched(synced=False, connected=False, stale=2.0))
    report = checkup.Checkup(list(contact.reached(state)), [])
    checkup._look_at_server(report, None, state)
    (found,) = report.findings
    assert found.what == "the API server cannot be reached at 10.0.0.1:6443: No route to host"
    monkeypatch.setattr(greeting, "greet", lambda *_: lists.Greeting(None, None, 2.0))
    report = checkup.Checkup(list(contact.reached(state)), [])
    checkup._look_at_server(report, None, state)
    assert [one.severity for one in report.findings] == [Severity.BROKEN, Severity.DEGRADED]


def test_lists_that_could_be_read_are_not_called_unread():
    refused = watched("endpointslices", synced=False, connected=False, trouble="not allowed (code 403)")
    assert contact.unread(reach(watched(), refused), "late").why == "without endpointslices nothing else can be checked"
    assert contact.unread(reach(refused), "late").why.startswith("no object of the cluster can be read")


@pytest.mark.parametrize("text", ["mode: nftables", "mode: nftables\nstrict: true"])
def test_the_flag_strict_beside_a_file_is_no_difference(tmp_path, text):
    file = tmp_path / "config.yaml"
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    file.write_text(f"{head}{text}\n", encoding="utf-8")
    config = made_strict(read_text(file.read_text(encoding="utf-8"))[0])
    assert list(checkup._configured(SimpleNamespace(config=config, path=lambda _: file), "/c")) == []


def test_pods_beside_cluster_cidr_count_as_clients_outside():
    found = identity.networked(node(cidrs=["10.244.0.0/24"]), "ClusterCIDR", ["10.99.0.0/16"], {pack("10.244.0.1")})
    assert "count as outside clients: their connections to cluster IPs are masqueraded, and" in next(found).why


@pytest.mark.parametrize(
    ("mode", "why"), [("ipvs", "each may remove the other's rules"), ("iptables", "both translate")]
)
def test_a_second_proxy_need_not_do_harm(mode, why):
    (found,) = strangers.second([(ProxyProcess(9, (), True), "ipvs")], mode)
    assert (why in found.why, "and connections may reach deleted endpoints" in found.why) == (True, True)


@pytest.mark.parametrize(
    ("present", "reason"),
    [([], "no Service answers at its IPv4 addresses on this node"), ([V4], "accepted before stay")],
)
def test_a_table_that_the_kernel_refuses_is_one_error(present, reason, monkeypatch):
    facts = SimpleNamespace(
        reach=None,
        standings=[FamilyStanding(V4, refusal="Operation not permitted", queued=2)],
        writes=True,
        began={},
        unready={"sync": "not yet synced for the first time: IPv4", "kernel": "Operation not permitted"},
        version=build().name,
        started=0.0,
        config_file="",
    )
    mode, traces = SimpleNamespace(name="nftables", interface=""), [Trace("table", one) for one in present]
    rules = SimpleNamespace(traces={"nftables": traces}, processes=[])
    node = CheckedNode(facts, 0, mode, KubeProxyConfiguration(), running=True, family=V4, rules=rules)
    monkeypatch.setattr(checkup, "rules_left", lambda *_, **__: ())
    monkeypatch.setattr(checkup, "_translations", lambda *_, **__: ())
    monkeypatch.setattr(checkup, "_chains", lambda *_, **__: ())
    report = checkup.Checkup([], [])
    checkup._look_at_proxy(report, node, facts)
    report.look("rules", lambda: checkup._rules(node))
    assert report.unknown == []
    assert [one.what for one in report.findings] == ["the kernel refuses changes of IPv4: Operation not permitted"]
    assert reason in report.findings[0].why


def test_the_rules_of_each_mode_are_read_once(monkeypatch):
    looks = []
    monkeypatch.setattr(Mode, "traces", lambda mode, *_: looks.append(mode.name) or [])
    node = CheckedNode(None, 0, modes.named("nftables"), KubeProxyConfiguration())
    assert (node.own_traces, replace(node, family=V4).own_traces) == ([], [])
    assert looks == [mode.name for mode in modes.every()]


@pytest.mark.parametrize(("forwarded", "mark"), [(True, "?"), (False, "x")])
def test_the_order_of_both_iptables_is_unknown_if_the_proxy_translates_too(forwarded, mark, monkeypatch):
    chains = [RuleChain("nft", V4, "nat", "KUBE-SERVICES"), RuleChain("legacy", V4, "nat", "KUBE-SERVICES")]
    trace = SimpleNamespace(catches=lambda *_: True)
    rules = SimpleNamespace(sight=SimpleNamespace(xtables=chains), traces={"iptables": [trace, trace]})
    old = SimpleNamespace(where="iptables-legacy -t nat", ends=[(b"\n\xf4\0\x09", 80)])
    monkeypatch.setattr(checkup, "_traces_left", lambda *_, **__: [])
    monkeypatch.setattr(checkup, "_as_sent", lambda packet: packet)
    monkeypatch.setattr(checkup, "all_translations", lambda *_: ([old], True))
    node = SimpleNamespace(
        packet=SimpleNamespace(destination=b"\n\x60\0\1", port=80),
        running=True,
        proxies=[],
        first=object(),
        mode=SimpleNamespace(flows_end=ENDPOINTS, name="iptables"),
        concerns=lambda _: True,
        served=1,
        targets=[],
        rules=rules,
        others=[],
    )
    (found,) = checkup.rules_left(node, forwarded=forwarded)
    assert (found.severity.mark, "either may translate" in found.why) == (mark, forwarded)
    assert found.what.endswith(", with rules for 10.96.0.1:80, to 10.244.0.9:80")
