"""Names of interfaces, the only external texts in rules, are parsed as names or refused."""

from __future__ import annotations

import re
from contextlib import closing

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.rules import pods_in_iptables
from kubeproxy.config.fields import API_VERSION
from kubeproxy.config.load import read_text
from kubeproxy.errors import ConfigError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Detector
from support.cluster_objects import world
from support.effort import examples
from support.namespaces import run
from support.own_network import own_network

WORDS = ('"; flush ruleset; #', "\n", "}", "a b", "\\", "$x", "*", "eth0", "br-lan.100", "@x", '"', "\0", "é", "x" * 15)
words = st.one_of(st.sampled_from(WORDS), st.text(max_size=30))
BASE = world(families=[Family.IPV4])


@examples(60)
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
        with closing(nfnetlink.Transactions.open()) as transactions:
            transactions.commit(ruleset.creation())
        assert f'iifname "{name}"' in run("nft", "list", "table", *ruleset.name.split()) or re.search("[*]", name)
        run("iptables-nft-restore", "--test", text=f"*filter\n-A FORWARD {match} -j ACCEPT\nCOMMIT\n")
