"""The signature of new chains follows from two handles that the kernel reports of their transaction."""

import pytest

from kubeproxy.backends.nftables.audit import Signature, Signed, grown
from kubeproxy.backends.nftables.layout import ChainName
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.kernel.nftables.nfnetlink import TableHeader, created
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals

CHAINS = {ChainName(False, "pick", 2, 60), ChainName(False, "affinity", 0, 60), ChainName(False, "slot", 0)}
RULESET = Ruleset(Family.IPV4, Globals("node"))
MADE = RULESET.messages(CHAINS, [b"\x14\0\0\0" + bytes(16)])
BEFORE = Signature(TableHeader(1, "ours", dormant=False), {"a": Signed(2, None, (3,))})


def test_objects_of_a_transaction_have_handles_in_a_row():
    found = grown(BEFORE, MADE, [10, 21])
    assert found.header == BEFORE.header
    assert found.chains == {
        "a": Signed(2, None, (3,)),
        "affinity-0-60s": Signed(10, None, (13, 14, 15)),
        "pick-2-60s": Signed(11, None, (16, 17, 18, 20)),  # 19 is the set of the last rule
        "slot-0": Signed(12, None, (21,)),
    }


@pytest.mark.parametrize("reported", [[10, 20], [10, 22], [4, 21], [10], []])
def test_a_chain_that_existed_is_of_another_program(reported):
    assert grown(BEFORE, MADE, reported) is None


def test_sets_of_clients_may_exist():
    kinds = [name for _, name in created(MADE)]
    assert kinds[0] == "clients-0"
    assert grown(BEFORE, MADE[1:], [10, 21]) == grown(BEFORE, MADE, [10, 21])


def test_removed_chains_are_no_longer_expected():
    made = [chain_message(Family.IPV4, "t", "b")]
    assert grown(BEFORE, made, [7, 7]).without(["b", "unknown"]) == BEFORE
