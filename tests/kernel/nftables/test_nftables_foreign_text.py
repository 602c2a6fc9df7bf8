"""No text of an object is in what nft reads, and interface names, which are, are read as names or refused."""

from __future__ import annotations

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from kubeproxy.backends.nftables.layout import VERDICT_MAPS, parse_chain_name
from kubeproxy.backends.nftables.render import render
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.text import element_lines
from kubeproxy.backends.rules import pods_in_iptables
from kubeproxy.config.load import read_text
from kubeproxy.config.types import API_VERSION
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import Family
from kubeproxy.model.compile import compile_service
from kubeproxy.model.objects import EndpointPort, ServicePort
from kubeproxy.model.plan import Detector
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.namespaces import run
from support.nftables_plans import placed
from support.own_network import own_network

WORDS = ('"; flush ruleset; #', "\n", "}", "a b", "\\", "$x", "*", "eth0", "br-lan.100", "@x", '"', "\0", "é", "x" * 15)
words = st.one_of(st.sampled_from(WORDS), st.text(max_size=30))
BASE = world(families=[Family.IPV4])


def text_of(namespace: str, name: str, port: str, node: str, globals_=BASE) -> str:
    """All that nft would read of a node with one Service that has every kind of address."""
    ports = [ServicePort(port=80, node_port=30080, name=port)]
    spec = {"external_ips": ["203.0.113.1"], "session_affinity": "ClientIP", "external_traffic_policy": "Local"}
    subject = service(name, namespace=namespace, ports=ports, ingress=["198.51.100.1"], **spec)
    slices = [parsed(endpoint("10.244.0.1", HERE), endpoint("10.244.1.1", node), family="IPv4",
                     ports=[EndpointPort(port=80, name=port)])]  # fmt: skip
    elements = render(placed(compile_service(subject, slices, globals_).plans))
    ruleset = Ruleset(Family.IPV4, globals_)
    gotos = {name for set_id in VERDICT_MAPS for name in elements.get(set_id, {}).values()}
    needed = [found for name in gotos if (found := parse_chain_name(name.decode())) is not None]
    return ruleset.skeleton(needed) + "\n".join(element_lines(ruleset.layout, ruleset.name, elements)) + "\n"


@settings(max_examples=200)
@given(words, words, words, words)
def test_texts_of_objects_are_not_in_it(namespace: str, name: str, port: str, node: str) -> None:
    assert text_of(namespace, name, port, node) == text_of("default", "web", "p", "node-b")


def test_nft_takes_it() -> None:
    with own_network():
        run("nft", "-c", "-f", "-", text=text_of(*WORDS[:4]))


@settings(max_examples=60)
@given(words)
@example('x" ; flush')
@example("a'b")
@example("a*")
@example("a\\")
@example("a;b")
@example("a,b")
@example("a{b")
def test_interface_names_are_names_or_refused(name: str) -> None:
    shown = "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in name)
    head = f"apiVersion: {API_VERSION}\nkind: KubeProxyConfiguration\ndetectLocalMode: BridgeInterface\n"
    try:
        config, _ = read_text(f'{head}detectLocal: {{bridgeInterface: "{shown}"}}\n')
        detector = Detector("bridge", config.detect_local.bridge_interface)
        match = pods_in_iptables(detector)
    except ConfigError:
        return
    ours = structs.replace(BASE, ipv4=structs.replace(BASE.ipv4, detector=detector))
    ruleset = Ruleset(Family.IPV4, ours)
    with own_network():
        run("nft", "-f", "-", text=ruleset.skeleton([]))
        assert f'iifname "{name}"' in run("nft", "list", "table", *ruleset.name.split()) or re.search("[*]", name)
        run("iptables-nft-restore", "--test", text=f"*filter\n-A FORWARD {match} -j ACCEPT\nCOMMIT\n")
