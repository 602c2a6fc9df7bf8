"""The signature of new chains follows from two handles that the kernel reports of their transaction."""

import pytest

from kubeproxy.backends.nftables.audit import grown
from kubeproxy.backends.nftables.layout import ChainName
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.table_view import Signature, Signed
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.kernel.nftables.nfnetlink import TableHeader
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals

CHAINS = {
    ChainName(False, "pick", affinity=60),
    ChainName(False, "recall", affinity=60),
    ChainName(False, "maglev", 251),
}
RULESET = Ruleset(Family.IPV4, Globals("node"))
MADE = RULESET.messages(CHAINS)
BEFORE = Signature(TableHeader(1, "ours", dormant=False), {"a": Signed(2, None, (3,))})


def test_objects_of_a_transaction_have_handles_in_a_row():
    found = grown(BEFORE, MADE, [10, 23])
    assert found.header == BEFORE.header
    assert found.chains == {
        "a": Signed(2, None, (3,)),
        "maglev-251": Signed(10, None, (13,)),
        "pick-60s": Signed(11, None, (14, 15, 16, 17)),
        "recall-60s": Signed(12, None, (18, 19, 20, 21, 22, 23)),
    }


@pytest.mark.parametrize("reported", [[10, 22], [10, 24], [4, 23], [10], []])
def test_a_chain_that_existed_is_of_another_program(reported):
    assert grown(BEFORE, MADE, reported) is None


def test_removed_chains_are_no_longer_expected():
    made = [chain_message(Family.IPV4, "t", "b")]
    assert grown(BEFORE, made, [7, 7]).without(["b", "unknown"]) == BEFORE
