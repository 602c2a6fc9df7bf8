"""Our rules as values, compared with the rules that nft compiles and lists, and with those that the kernel returns."""

import re
import socket
import subprocess
from contextlib import closing

import pytest
from msgspec.structs import replace

from kubeproxy.backends.nftables import audit
from kubeproxy.backends.nftables.layout import TABLE, TRANSPORTS, ChainName
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.userspace.ruleset import TABLE as USERSPACE
from kubeproxy.backends.userspace.ruleset import UserspaceRuleset
from kubeproxy.features import RESETS
from kubeproxy.kernel.netlink import protocol
from kubeproxy.kernel.netlink.protocol import Netlink, text_attribute
from kubeproxy.kernel.nftables import compiling, expressions, listing, messages, nfnetlink, nfta
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Detector, FamilyGlobals, Globals, Loopback
from support import nft
from support.nft_text import as_text, skeleton
from support.own_network import own_network

NETWORKS = {Family.IPV4: ("10.0.0.0/16", "10.0.0.0/15"), Family.IPV6: ("fd00::/64", "fd00::/61")}
STICKY = [
    ChainName(nodeport=False, treatment="cluster", affinity=10800),
    ChainName(nodeport=True, treatment="policy-local", affinity=5),
    ChainName(nodeport=True, treatment="local-pick", affinity=5),
    ChainName(nodeport=False, treatment="cluster-maglev", size=251),
    ChainName(nodeport=True, treatment="external-client-maglev", size=1021),
]


def worlds(family):
    """Globals under which each of our rules is written."""
    ours = [
        FamilyGlobals(Detector("network", NETWORKS[family][0]), nodeport_ips=None, loopback=Loopback.REFUSED),
        FamilyGlobals(Detector("network", NETWORKS[family][1]), loopback=Loopback.RELAYED),
        FamilyGlobals(Detector("prefix", "veth")),
        FamilyGlobals(Detector("bridge", "cni0")),
    ]
    base = RESETS.on(Globals("node", ejects=True, ipv4=None, ipv6=None), True)
    name = "ipv4" if family is Family.IPV4 else "ipv6"
    return [replace(base, **{name: each, "masquerade_all": number == 3}) for number, each in enumerate(ours)]


def texts(family):
    """Yield each text that the backend loads, with the name of its table."""
    landing = socket.inet_pton(family, "10.9.9.9" if family is Family.IPV4 else "fd00::9")
    for world in worlds(family):
        yield skeleton(Ruleset(family, world), STICKY), TABLE
        for address in (None, landing):
            ruleset = UserspaceRuleset(family, world, address)
            yield as_text(ruleset.name, ruleset.definition(), ruleset.chains()), USERSPACE


def written(text):
    """Return the rules of a text, by chain."""
    found = {}
    for chain, rule in re.findall(r"^add rule ip6? \S+ (\S+) (.*)$", text, re.MULTILINE):
        found.setdefault(chain, []).append(rule)
    return found


def dumped(family, table):
    """Return the kernel's rules by chain, with their anonymous sets."""
    found = {}
    with TableReader(family, table, Netlink.open()) as reader:
        for rule in reader.rules():
            parsed = (with_set(each, reader) for each in expressions.parse(rule.raw))
            found.setdefault(rule.chain, []).append(tuple(parsed))
    return found


def with_set(expression, reader):
    if not isinstance(expression, expressions.Lookup) or not expression.set.startswith("__"):
        return expression
    elements = reader.all_elements(expression.set)
    return replace(expression, set=frozenset((each.key, each.data) for each in elements))


def simplified(rule):
    """Return a compiled rule in the form of `dumped`; without superfluous expressions of nft 1.0.6."""
    found = []
    for each in placed(rule):
        if isinstance(each, expressions.Byteorder) and each.length < each.size:
            continue
        if isinstance(each, expressions.Lookup) and isinstance(each.set, expressions.Inline):
            elements = ((key, data.chain.encode() if data else b"") for key, data in each.set.elements)
            found.append(replace(each, set=frozenset(elements)))
        else:
            found.append(each)
    return tuple(found)


def placed(rule):
    """Return a rule whose registers after the key of an update are renumbered as 1000, 1001 and so on.

    nft 1.0.6 leaves the rest of a whole register between them and the key, nft 1.1.3 does not.
    """
    start = next((slot(each.data) for each in rule if isinstance(each, expressions.Update) and each.data), None)
    return rule if start is None else tuple(_placed(each, start) for each in rule)


def _placed(expression, start):
    names = ("dreg", "sreg", "data") if isinstance(expression, expressions.Update) else ("dreg", "sreg")
    slots = {name: slot(getattr(expression, name)) for name in names if getattr(expression, name, None)}
    return replace(expression, **{name: 1000 + each - start for name, each in slots.items() if each >= start})


def slot(register):
    """Return the position of a register in units of 4 bytes."""
    return register - 8 if register >= 8 else 4 * (register - 1)


def clobbered(rule):
    """Return whether nft 1.0.6 loads the data of an element over the end of its key, if that has more than 16 bytes."""
    update = next((each for each in rule if isinstance(each, expressions.Update)), None)
    return update is not None and update.data == 2 and sum(getattr(each, "length", 0) == 16 for each in rule) > 1


@pytest.mark.parametrize("family", Family)
def test_rules_are_compiled_as_nft_compiles_them(family):
    for text, table in texts(family):
        with own_network():
            nft.run(text)
            there = dumped(family, table)
        ip = "ip" if family is Family.IPV4 else "ip6"
        for chain, rules in written(text).items():
            for rule, found in zip(rules, there[chain], strict=True):
                if clobbered(found):
                    continue
                assert simplified(compiling.rule(rule, ip)) == simplified(found), rule


@pytest.mark.parametrize("family", Family)
def test_rules_are_listed_as_nft_lists_them(family):
    ip = "ip" if family is Family.IPV4 else "ip6"
    for text, table in texts(family):
        with own_network():
            nft.run(text)
            out = subprocess.run(["nft", "list", "table", ip, table], capture_output=True, text=True, check=True).stdout
        listed = dict(re.findall(r"^\tchain (\S+) \{\n(.*?)^\t\}", re.sub(r",\n\s*", ", ", out), re.M | re.S))
        for chain, rules in written(text).items():
            lines = [line.strip() for line in listed[chain].splitlines() if "\ttype " not in line]
            ours = [listing.text(compiling.rule(rule, ip), ip) for rule in rules]
            assert list(map(unordered, ours)) == list(map(unordered, lines))
            assert [compiling.rule(line, ip) for line in ours] == [compiling.rule(rule, ip) for rule in rules]


def unordered(line):
    """Return a listed rule with the elements of its anonymous set in order, because the kernel has no order."""
    head, brace, rest = line.partition("{ ")
    return head, sorted(rest.removesuffix(" }").split(", ")) if brace else []


@pytest.mark.parametrize("family", Family)
def test_rules_written_over_netlink_read_and_list_like_rules_loaded_by_nft(family):
    ruleset = Ruleset(family, worlds(family)[0])
    names = ruleset.needed(STICKY)
    with own_network():
        nft.run(skeleton(ruleset, STICKY))
        by_nft, listed, sets = dumped(family, TABLE), list_table(ruleset), notes(family)
    with own_network():
        with closing(nfnetlink.Transactions.open()) as transactions:
            protocols = audit.desired_node_sets(FamilyGlobals())[TRANSPORTS]
            transactions.commit(ruleset.creation(names, audit.filling(family, TRANSPORTS, protocols)))
        assert notes(family) == sets
        with TableReader(family, TABLE, Netlink.open()) as reader:
            assert reader.contents() == ruleset.definition(names).contents
        found = dumped(family, TABLE)
        assert found.keys() == by_nft.keys()
        for chain, rules in by_nft.items():
            for rule, theirs in zip(found[chain], rules, strict=True):
                assert placed(rule) == placed(theirs) or clobbered(theirs)
        assert list_table(ruleset) == listed
        nft.run(f"delete table {ruleset.name}\n")
        nft.run(listed)


@pytest.mark.parametrize("family", Family)
def test_the_table_of_userspace_mode_comes_back(family):
    for world in worlds(family):
        ruleset = UserspaceRuleset(family, world, None)
        with own_network(), closing(nfnetlink.Transactions.open()) as transactions:
            transactions.commit(ruleset.creation())
            with TableReader(family, USERSPACE, Netlink.open()) as reader:
                assert reader.contents() == ruleset.definition().contents


def notes(family):
    """Return the kernel's data about each set, including nft's userdata; without handles and counts."""
    found = {}
    request = nfnetlink.GENERIC.pack(family, 0, 0) + text_attribute(nfta.SET_TABLE, TABLE)
    with closing(Netlink.open()) as link:
        for data in link.dump_all(nfnetlink.GET_SET, request, "sets"):
            for at in protocol.messages(data):
                if at.kind >> 8 == nfnetlink.SUBSYSTEM:
                    parts = {kind: data[s:e] for kind, s, e in protocol.attributes(data, at.start + 4, at.end)}
                    found[parts.pop(nfta.SET_NAME)] = {kind: parts.get(kind) for kind in (3, 4, 5, 6, 7, 9, 11, 13, 17)}
    return {name: parts for name, parts in found.items() if not name.startswith(b"__") and name != b"transports\0"}


def list_table(ruleset):
    out = subprocess.run(["nft", "list", "table", *ruleset.name.split()], capture_output=True, text=True, check=True)
    blocks = re.findall(r"^\t(?:chain|counter|set|map) .*?^\t\}$", out.stdout, re.MULTILINE | re.DOTALL)
    return (
        f"table {ruleset.name} {{\n"
        + "\n".join(sorted(blocks, key=lambda block: (block[1:3] == "ch", block)))
        + "\n}\n"
    )


def test_rules_of_other_programs_are_parsed_with_their_unknown_parts():
    text = """table ip other {
        chain input {
            type filter hook input priority 0; policy accept;
            ct state invalid counter drop
            tcp dport 22 limit rate 5/minute accept
            ip saddr 192.0.2.1-192.0.2.9 log prefix "x" drop
            meta mark set ct mark
        }
    }"""
    with own_network():
        nft.run(text)
        rules = dumped(Family.IPV4, "other")["input"]
        messages_again = [
            message for rule in rules for message in messages.appended(Family.IPV4, "other", "input", rule)
        ]
        with closing(nfnetlink.Transactions.open()) as transactions:
            transactions.commit(messages_again)
        again = dumped(Family.IPV4, "other")["input"]
    assert again == [*rules, *rules]
    assert any(isinstance(each, expressions.Opaque) and each.name == "log" for each in rules[2])
    assert "log" in listing.text(rules[2], "ip")
