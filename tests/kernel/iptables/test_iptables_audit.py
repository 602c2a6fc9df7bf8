"""The audit on the real kernel, by both variants: how rules are printed, and which damage is found and repaired."""

from __future__ import annotations

import socket

import pytest
from msgspec import structs

from kubeproxy.backends.iptables import found
from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.iptables.skeleton import (
    CANARY_TABLES,
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    StartOptions,
    chain_hashes,
)
from kubeproxy.backends.mode import Depth
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Detector
from support.fake_tables import Told
from support.iptables_cases import case, planner_of
from support.iptables_kernel import WORLD, check, opened, plans, state
from support.namespaces import run
from support.places import CASES

WEB = f"KUBE-SVC-{chain_hashes(['default/atcp'])[0]}"
POD = f"KUBE-SEP-{chain_hashes(['default/atcp10.244.0.1:8080'])[0]}"


def suspects(made: IptablesBackend) -> list:
    """Return the chains whose printed form differs from the expected one, before the audit prints copies of them."""
    tables = {table: found.read(made._commands, table) for table in CANARY_TABLES}
    shared = found.shared_suspects(made._contents.common(), tables)
    return [*shared, *found.own_suspects(made._contents, tables["nat"])]


def conformance_plans(family: Family) -> dict:
    """Yield the rules of all conformance cases, each step in a separate namespace."""
    plans_by_name = {}
    for path in sorted(CASES.glob("*.json")):
        for number, step in enumerate(case(path.stem)["steps"]):
            where = f"{path.stem}-{number}"
            for name, compiled in planner_of({}, step["objects"]).compiled.items():
                plans_by_name[where, f"{name[0]}-{name[1]}"] = tuple(
                    structs.replace(plan, key=plan.key._replace(namespace=f"{where}-{plan.key.namespace}"))
                    for plan in compiled.plans
                    if plan.key.family is family
                )
    return plans_by_name


@pytest.mark.quick("nft-IPv6", "legacy-IPv4")
@pytest.mark.parametrize("family", list(Family), ids=["IPv4", "IPv6"])
def test_rules_of_all_conformance_cases_are_printed_as_expected(variant, family):
    wanted = conformance_plans(family)
    assert len(wanted) > 100
    pods = "10.244.0.0/16" if family is Family.IPV4 else "fd00:244::/32"
    commands = xtables.variant_commands(family, variant)
    for detector in (Detector("network", pods), Detector("bridge", "cni0"), Detector("prefix", "veth")):
        ours = structs.replace(WORLD.of(family), detector=detector, nodeport_ips=None)
        world = structs.replace(WORLD, **{"ipv4" if family is Family.IPV4 else "ipv6": ours})
        made = IptablesBackend.open(commands, world, StartOptions(True, detector.kind == "network", False), Told())
        list(made.resync(wanted))
        assert suspects(made) == []
        made.close()


@pytest.mark.parametrize("family", list(Family), ids=["IPv4", "IPv6"])
def test_rules_with_packet_counters_are_printed_as_expected(variant, family):
    assert xtables.ensure_counter(LOCALHOST_COUNTER)
    assert xtables.ensure_counter(INVALID_COUNTER)
    made = IptablesBackend.open(
        xtables.variant_commands(family, variant), WORLD, StartOptions(True, False, True), Told()
    )
    list(made.resync(state() if family is Family.IPV4 else {}))
    assert suspects(made) == []
    made.close()


def test_odd_names_and_ranges_are_printed_as_expected(variant):
    ranges = ["10.1.2.3/8", "198.51.100.7/32", "192.0.2.128/25", "0.0.0.0/0"]
    spec = {"ingress": ["203.0.113.9"], "type": "LoadBalancer", "load_balancer_source_ranges": ranges}
    (plan,) = plans("a", 1, "10.244.0.1", **spec)
    names = ["a\"b'c\\d", "two words", "-j", "Ünicode", "$(a)`b`", "a_b-c.d", "1"]
    wanted = {(n, n): (structs.replace(plan, key=plan.key._replace(namespace=n, name=n)),) for n in names}
    made = opened(variant)
    list(made.resync(wanted))
    assert suspects(made) == []
    # iptables truncates such a comment, and prints it without quotes: the printed form of a copy decides.
    name = "x" * 250
    wanted[name, name] = (structs.replace(plan, key=plan.key._replace(namespace=name, name=name)),)
    list(made.resync(wanted))
    assert suspects(made)
    made._audit.suspect(0.0)
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    made.close()


HARM = {
    "a rule is deleted": ["-D", POD, "1"],
    "another destination": [
        *["-R", POD, "2", "-p", "tcp", "-m", "comment", "--comment", "default/a", "-m", "tcp"],
        *["-j", "DNAT", "--to-destination", "10.244.0.9:8080"],
    ],
    "a rule in front": ["-I", WEB, "-s", "192.0.2.7", "-j", "RETURN"],
    "a rule at the end": ["-A", POD, "-j", "ACCEPT"],
    "a flush": ["-F", WEB],
    "the mark": ["-R", "KUBE-MARK-MASQ", "1", "-j", "MARK", "--set-xmark", "0x8000/0x8000"],
    "the order": ["-I", "KUBE-POSTROUTING", "-j", "RETURN"],
}


def rested(made: IptablesBackend) -> None:
    """Let the time pass in which no audit follows a write."""
    made._audit._ended -= 1000.0


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_harm_is_found_and_repaired(variant, harm):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    assert not made.touched()
    run(f"iptables-{variant}", "-t", "nat", *harm)
    assert made.touched()
    found = made.inspect(Depth.QUICK).what
    assert f"chain {harm[1]} of " in found
    assert ("of Service default/a " in found) == (harm[1] in (WEB, POD))
    list(made.resync(wanted))
    check(variant, wanted)
    rested(made)
    assert made.touched(), "the repair is looked at"
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    assert "AUDIT" not in run(f"iptables-{variant}-save")
    made.close()


def test_a_chain_that_was_removed_comes_back(variant):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    for command in (["-F", WEB], ["-F", POD], ["-X", POD]):
        run(f"iptables-{variant}", "-t", "nat", *command)
    assert made.touched()
    assert "of Service default/a (IPv4), and 1 more, was changed" in made.inspect(Depth.QUICK).what
    list(made.resync(wanted))
    check(variant, wanted)
    made.close()


def test_rules_of_other_programs_next_to_ours_are_no_drift(variant):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    text = (
        "*nat\n:CNI-HOSTPORT-DNAT - [0:0]\n:KUBE-SVC-OTHER - [0:0]\n"
        "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.244.0.8:80\n"
        f"-A KUBE-SVC-OTHER -j {WEB}\n-A PREROUTING -j CNI-HOSTPORT-DNAT\nCOMMIT\n"
    )
    run(f"iptables-{variant}-restore", "--noflush", text=text)
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    list(made.sync([(("default", "c"), plans("c", 3, "10.244.0.5"))]))
    run(f"iptables-{variant}", "-t", "nat", "-D", "PREROUTING", "-j", "CNI-HOSTPORT-DNAT")
    rested(made)
    assert made.inspect(Depth.QUICK) is None
    assert ":KUBE-SVC-OTHER" in run(f"iptables-{variant}-save", "-t", "nat")
    made.close()


def test_changes_of_other_programs_chains_cause_no_audit(netns):
    made, wanted = opened("nft"), state()
    list(made.resync(wanted))
    for number in range(3):
        run("iptables-nft", "-t", "nat", "-N", f"CNI-{number}")
        run("nft", "add", "table", "ip", f"other-{number}")
        assert not made.touched()
    list(made.sync([(("default", "c"), plans("c", 3, "10.244.0.5"))]))
    assert not made.touched()
    run("iptables-nft", "-t", "nat", "-X", "CNI-0")
    assert not made.touched()
    run("iptables-nft", "-t", "nat", "-N", "KUBE-SVC-OTHER")
    assert made.touched()
    made.close()


def test_one_family_uses_the_writes_of_the_other(netns):
    """Transactions of both families increment the same generation."""
    four, six = opened("nft"), opened("nft", Family.IPV6)
    for made in (four, six):
        list(made.resync(state()) if made is four else made.resync({}))
    for number in range(1, 4):
        list(four.sync([(("default", "c"), plans("c", 3, f"10.244.0.{number}"))]))
        assert not six.touched()
        assert not four.touched()
    run("ip6tables-nft", "-t", "nat", "-F", "KUBE-SERVICES")
    assert not four.touched()
    assert six.touched()
    assert "chain KUBE-SERVICES of iptables table nat (IPv6)" in six.inspect(Depth.QUICK).what
    for made in (four, six):
        made.close()


def test_announcements_that_are_missed_are_no_quiet(netns):
    made, wanted = opened("nft"), state()
    list(made.resync(wanted))
    with made._watch._others.paused(made._watch._transactions.generation):
        run("iptables-nft", "-t", "nat", *HARM["a flush"])
    assert made.touched()
    assert WEB in made.inspect(Depth.QUICK).what
    made.close()


def test_announcements_that_do_not_fit_are_no_quiet(netns):
    made, wanted = opened("nft"), state()
    list(made.resync(wanted))
    made._watch._others._announced._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    many = "".join(f"-A {WEB} -s 192.0.2.{n}/32 -j RETURN\n" for n in range(200))
    run("iptables-nft-restore", "--noflush", text=f"*nat\n{many}COMMIT\n")
    assert made.touched()
    assert WEB in made.inspect(Depth.QUICK).what
    list(made.resync(wanted))
    rested(made)
    assert made.inspect(Depth.QUICK) is None
    for _ in range(2):
        run("iptables-nft", "-t", "nat", "-N", "KUBE-SVC-OTHER")
        assert made.touched()
        run("iptables-nft", "-t", "nat", "-X", "KUBE-SVC-OTHER")
        assert made.inspect(Depth.QUICK) is None
    made.close()


def test_programs_that_only_list_legacy_rules_cause_rare_audits(netns):
    made, wanted = opened("legacy"), state()
    list(made.resync(wanted))
    run("iptables-legacy", "-t", "nat", "-S", "POSTROUTING")
    for rest, command in ((200.0, ["-S", "POSTROUTING"]), (20.0, ["-N", "OTHER"])):
        run("iptables-legacy", "-t", "nat", *command)
        assert made._watch.touched()
        made._watch.inspect()
        assert made._watch.rest == rest
    made.close()


def test_a_stale_chain_that_others_use_is_emptied_and_left(variant, caplog):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    other = ["OUTPUT", "-d", "192.0.2.1/32", "-j", WEB]
    run(f"iptables-{variant}", "-t", "nat", "-A", *other)
    list(made.sync([(("default", "a"), ()), (("default", "c"), plans("c", 3, "10.244.0.5"))]))
    del wanted["default", "a"]
    wanted["default", "c"] = plans("c", 3, "10.244.0.5")
    for _ in range(2):
        list(made.resync(wanted))
        saved = run(f"iptables-{variant}-save", "-t", "nat").splitlines()
        assert [line for line in saved if WEB in line] == [f":{WEB} - [0:0]", f"-A {' '.join(other)}"]
        rested(made)
        assert made.inspect(Depth.QUICK) is None
    assert len([record for record in caplog.records if "Leaving" in record.message]) == 1
    run(f"iptables-{variant}", "-t", "nat", "-D", *other)
    list(made.resync(wanted))
    check(variant, wanted)
    made.close()
