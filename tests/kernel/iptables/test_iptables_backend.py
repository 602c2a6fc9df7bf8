"""The iptables backend on the real kernel, by both variants: writing and repairing rules, waiting for locks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kubeproxy.backends.iptables import mode
from kubeproxy.backends.leftovers import remove_iptables_rules
from kubeproxy.backends.mode import Depth
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables, xtables_lock
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.model.addresses import Family
from support.fake_tables import Told
from support.iptables_cases import go_rules
from support.iptables_kernel import check, expected, opened, plans, rules, state
from support.lock_files import is_free
from support.namespaces import run


def test_the_kernel_has_exactly_the_written_rules(variant):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    check(variant, wanted)
    changes = [
        (("default", "a"), plans("a", 1, "10.244.0.1", "10.244.0.9", "10.244.0.3")),
        (("default", "b"), ()),
        (("default", "c"), plans("c", 3, "10.244.0.5")),
        (("default", "d"), plans("d", 4, "10.244.0.6", external_ips=["203.0.113.1"])),
    ]
    list(made.sync(changes))
    wanted = {name: found for name, found in (wanted | dict(changes)).items() if found}
    check(variant, wanted)
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    made.close()


def test_the_first_sync_takes_over_the_go_proxys_rules(variant):
    run(f"iptables-{variant}-restore", "--noflush", text=go_rules(Family.IPV4))
    run(f"iptables-{variant}", "-A", "KUBE-FIREWALL", "-m", "mark", "--mark", "0x8000/0x8000", "-j", "DROP")
    made, wanted = opened(variant), state()
    for _ in range(2):
        list(made.resync(wanted))
    seen, should = rules(variant), expected(wanted)
    ours = [p for p in should if p[1].startswith("KUBE-") and p[1] != "KUBE-FIREWALL"]
    assert {p: seen[p] for p in ours} == {p: should[p] for p in ours}
    assert {chain for table, chain in seen if chain.startswith("KUBE-S") and table == "nat"} == {
        chain for table, chain in should if chain.startswith("KUBE-S") and table == "nat"
    }
    for place in (("nat", "PREROUTING"), ("nat", "OUTPUT"), ("filter", "FORWARD"), ("filter", "INPUT")):
        assert sorted(seen[place]) == sorted(should[place]), "each jump once"
    assert len(seen["filter", "KUBE-FIREWALL"]) == 2, "kubelet's own rule stays"
    made.close()


def test_comments_of_others_may_be_any_bytes(variant):
    odd = ["-m", "comment", "--comment", b"caf\xe9", "-j", "ACCEPT"]
    for rule in (["-t", "nat", "-A", "PREROUTING", *odd], ["-t", "filter", "-A", "FORWARD", *odd]):
        subprocess.run([f"iptables-{variant}", *rule], check=True)
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    made._audit.suspect(rest=0.0)
    assert made.inspect(Depth.QUICK) is None
    made.close()
    assert remove_iptables_rules() == []
    said = subprocess.run([f"iptables-{variant}-save"], capture_output=True, check=True).stdout
    assert said.count(b'--comment "caf\xe9"') == 2
    assert b"KUBE-SVC-" not in said


@pytest.mark.parametrize(
    "harm",
    [
        ["-t", "nat", "-F"],
        ["-t", "filter", "-F"],
        ["-t", "nat", "-F", "KUBE-SERVICES"],
        ["-t", "nat", "-D", "PREROUTING", "1"],
        ["-t", "mangle", "-X"],
    ],
    ids=" ".join,
)
def test_a_flush_is_noticed_and_repaired(variant, harm):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    assert not made.touched()
    run(f"iptables-{variant}", *harm)
    assert made.touched()
    assert made.inspect(Depth.QUICK) is not None
    list(made.resync(wanted))
    check(variant, wanted)
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    made.close()


def test_stale_chains_go_in_several_restores(netns, monkeypatch):
    spec = {"ingress": ["203.0.113.9"], "load_balancer_source_ranges": ["198.51.100.0/24"]}
    wanted = {("default", f"s{n}"): plans(f"s{n}", n, "10.244.0.1", "10.244.0.2", **spec) for n in range(1, 9)}
    made = opened("nft")
    list(made.resync(wanted))
    made.close()
    monkeypatch.setattr(RuleWriter, "chains_at_once", 5)
    told = Told()
    made = opened("nft", told=told)
    list(made.resync({}))
    check("nft", {})
    assert told.failed == []
    made.close()


def test_nft_rules_in_built_in_chains_are_kept(netns):
    made, wanted = opened("nft"), state()
    list(made.resync(wanted))
    for place in ("filter INPUT", "nat PREROUTING", "nat POSTROUTING"):
        run("nft", "add", "rule", "ip", *place.split(), "ct state established counter accept")
    for suspected in (None, frozenset({("filter", "INPUT"), ("nat", "PREROUTING")})):
        made._audit.suspect(0.0, suspected)
        assert made.inspect(Depth.QUICK) is None
    before = run("nft", "list", "chain", "ip", "filter", "INPUT")
    list(made.resync(wanted))
    assert run("nft", "list", "chain", "ip", "filter", "INPUT") == before, "each jump once"
    run("iptables-nft", "-t", "nat", "-F", "PREROUTING")
    run("nft", "add", "rule", "ip", "nat", "PREROUTING", "ct state established counter accept")
    assert made.touched()
    assert (
        made.inspect(Depth.QUICK).what
        == "the jump from PREROUTING to KUBE-SERVICES (IPv4) was removed by another program"
    )
    run("nft", "add", "rule", "ip", "nat", "KUBE-SERVICES", "ct state established counter accept")
    list(made.resync(wanted))
    assert "KUBE-SERVICES" in run("nft", "list", "chain", "ip", "nat", "PREROUTING")
    assert "ct state" not in run("nft", "list", "chain", "ip", "nat", "KUBE-SERVICES")
    made._audit.suspect(0.0)
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    run("nft", "add", "rule", "ip", "nat", "KUBE-MARK-MASQ", "ct state established counter accept")
    made._audit.suspect(0.0, frozenset())
    assert "chain KUBE-MARK-MASQ of iptables table nat (IPv4) was changed" in made.inspect(Depth.QUICK).what
    made.close()


def test_changes_of_other_programs_elsewhere_are_no_drift(variant):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    run(f"iptables-{variant}", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "81", "-j", "RETURN")
    assert made.touched() == (variant == "legacy"), "nf_tables says what was changed"
    assert made.inspect(Depth.QUICK) is None
    assert not made.touched()
    made.close()


def test_a_chain_with_a_name_that_is_not_utf8_is_removed_like_any_stale_chain(variant):
    made, wanted = opened(variant), state()
    subprocess.run([f"iptables-{variant}", "-t", "nat", "-N", b"KUBE-SEP-\xff"], check=True)
    list(made.resync(wanted))
    check(variant, wanted)
    made.close()


def test_a_lock_that_others_hold_delays(netns, lock_file):
    told = Told()
    made, wanted = opened("legacy", told=told), state()
    holder = os.open(lock_file, os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    release = threading.Timer(0.3, os.close, [holder])
    release.start()
    list(made.resync(wanted))
    release.join()
    check("legacy", wanted)
    assert told.waits
    assert told.failed == []
    made.close()


def test_another_program_changes_nothing_between_our_looks_at_a_table(netns, lock_file):
    """Otherwise another program's change of the chain would be taken for the proxy's, and remain."""
    made, wanted = opened("legacy"), state()
    list(made.resync(wanted))
    free = []

    def pieces():
        free.append(is_free(lock_file))
        yield "*nat\n:KUBE-SEP-STRAY - [0:0]\nCOMMIT\n"
        free.append(is_free(lock_file))

    made._run(SimpleNamespace(restore=lambda: made._commands.restore(pieces()), commits=1, rules=0))
    assert free == [False, False]
    assert is_free(lock_file)
    assert ("nat", "KUBE-SEP-STRAY") in rules("legacy")
    made.close()


def test_a_waiter_for_the_lock_during_our_write_is_noticed(netns, lock_file):
    """Also if the change leaves the size of the table unchanged."""
    made, wanted = opened("legacy"), state()
    list(made.resync(wanted))
    run("iptables-legacy", "-t", "nat", "-A", "KUBE-SERVICES", "-p", "tcp", "--dport", "81", "-j", "RETURN")
    made.inspect(Depth.QUICK)
    assert not made.touched()
    others = []

    def pieces():
        command = ["iptables-legacy", "-w", "-t", "nat", "-R", "KUBE-SERVICES", "1", "-p", "tcp", "-j", "RETURN"]
        others.append(subprocess.Popen(command))
        inode = str(lock_file.stat().st_ino)
        while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            time.sleep(0.001)
        yield "*nat\n:KUBE-SEP-STRAY - [0:0]\nCOMMIT\n"

    made._run(SimpleNamespace(restore=lambda: made._commands.restore(pieces()), commits=1, rules=0))
    assert others[0].wait() == 0
    assert made.touched()
    assert xtables_lock.lock()._wanted
    made.close()


def test_a_command_that_outlives_us_keeps_the_lock(netns, lock_file):
    """Like an iptables-restore whose proxy is killed: the table that it has read must not change in the meantime."""
    lock = xtables_lock.lock()
    with lock.held(0.0):
        command = ["sh", "-c", "echo; read end"]
        ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen(command, **lock.start(), **ends)
        child.stdout.readline()
        os.close(lock._file)
        lock._file = -1
    assert not is_free(lock_file)
    child.communicate(b"\n")
    assert is_free(lock_file)
    with lock.held(0.0):
        assert not is_free(lock_file)
    assert is_free(lock_file)


def test_a_lock_file_that_is_replaced_is_not_held_any_more(netns, lock_file):
    lock = xtables_lock.lock()
    lock_file.unlink()
    with lock.held(0.0), lock.held(0.0):
        assert not is_free(lock_file)
    assert is_free(lock_file)


def test_old_commands_with_only_one_lock_take_it_themselves(netns):
    made, wanted = opened("legacy"), state()
    made._commands = made._watch._commands = old = made._commands._replace(version=(1, 8, 5))
    made._writer = RuleWriter(old, None)
    list(made.resync(wanted))
    check("legacy", wanted)
    assert not made.touched()
    made.close()


def test_a_lock_that_is_not_released_is_an_error_that_names_the_holder(netns, lock_file, monkeypatch):
    monkeypatch.setattr(xtables, "LOCK_TIMEOUT", 0)
    told = Told()
    made = opened("legacy", told=told)
    lock_file.touch()
    holder = subprocess.Popen(["flock", str(lock_file), "sleep", "100"])
    try:
        while is_free(lock_file):
            pass
        with pytest.raises(ApplyError, match=r"(flock|sleep) \(pid \d+\) has held the iptables lock"):
            list(made.resync(state()))
    finally:
        holder.kill()
        holder.wait()
    assert told.failed == [False]
    assert told.waits, "who waits in vain waits as well"
    made.close()


def test_a_start_waits_for_no_lock(netns, lock_file, monkeypatch):
    """Another program may hold the lock for long, such as the restore of a killed proxy: 8 s for 10,000 Services."""
    legacy = xtables.variant_commands(Family.IPV4, "legacy")
    monkeypatch.setattr(mode, "_commands", lambda family: legacy)
    monkeypatch.setattr(xtables, "LOCK_TIMEOUT", 1)
    mode.OPERATIONS.check(KubeProxyConfiguration(), [Family.IPV4])
    holder = os.open(lock_file, os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with pytest.raises(xtables_lock.LockHeldError):
            legacy.rules("nat", "POSTROUTING")
        mode.OPERATIONS.check(KubeProxyConfiguration(), [Family.IPV4])
    finally:
        os.close(holder)


def test_the_variant_is_the_one_with_the_hint_else_with_more_rules(netns):
    assert xtables.detect() == "nft"
    run("iptables-legacy", "-A", "INPUT", "-j", "ACCEPT")
    assert xtables.detect() == "legacy"
    run("iptables-nft", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    assert xtables.detect() == "nft"
    run("iptables-nft", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT")
    run("ip6tables-legacy", "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
    run("iptables-nft", "-A", "INPUT", "-j", "ACCEPT")
    assert xtables.detect() == "legacy"
