"""Other programs' changes of the table that do not affect elements by key: noticed and repaired; no reader fails."""

from contextlib import closing

import pytest

from kubeproxy.backends.mode import Depth
from kubeproxy.backends.nftables.layout import CLIENTS, TABLE, SetId
from kubeproxy.kernel.nftables import messages, nfnetlink
from kubeproxy.kernel.nftables.tables import ChainContents
from support.nftables_disturbances import disturbed
from support.nftables_ground import resync
from support.nftables_plans import V4, cluster

CATCH_ALLS = {
    SetId.ENDPOINTS: "* : 10.9.9.9 . 99",
    SetId.CLUSTER_SERVICES: "* : 3",
    SetId.AFFINITY_SERVICES: "* : drop",
    SetId.NO_ENDPOINT_SERVICES: "*",
    SetId.FIREWALL_ALLOW: "*",
    "transports": "*",
    CLIENTS: "* : 192.0.0.1",
}
FOREIGN = {
    "a rule with a catch-all": ("add chain {t} mine", "add rule {t} mine meta mark vmap {{ 1 : accept, * : drop }}"),
    "a chain of an earlier version": ("add chain {t} pick-100000000-5s",),
    "a table that is too large": ("add chain {t} cluster-maglev-99999999999999999999",),
    "a timeout that is too long": ("add chain {t} pick-99999999999999999999s",),
}


@pytest.mark.parametrize("name", CATCH_ALLS)
def test_an_element_that_matches_all_the_rest_is_removed(ground, name):
    backend, plans = disturbed(ground)
    before, header = ground.contents(), ground.header()
    ground.disturb(f"add element ip {TABLE} {name} {{ {CATCH_ALLS[name]} }}")
    difference = backend.inspect(Depth.THOROUGH)
    assert difference is not None
    assert f"elements of {name}" in difference.what
    resync(backend, plans)
    assert ground.contents() == before
    assert ground.header() == header
    ground.is_clean(backend, plans)


@pytest.mark.parametrize("what", FOREIGN)
def test_objects_of_another_program_are_removed(ground, what):
    backend, plans = disturbed(ground)
    chains, header = ground.chains(), ground.header()
    ground.disturb(*(line.format(t=f"ip {TABLE}") for line in FOREIGN[what]))
    assert backend.inspect(Depth.THOROUGH) is not None
    resync(backend, plans)
    assert ground.chains() == chains
    assert ground.header() == header
    ground.is_clean(backend, plans)


def test_names_may_have_any_bytes(ground):
    backend, plans = disturbed(ground)
    chains = ground.chains()
    name = b"\xff\xfe".decode(errors="surrogateescape")
    made = [messages.chain_message(V4, TABLE, name), *messages.rules(V4, TABLE, {name: ChainContents(None, ((),))})]
    with closing(nfnetlink.Transactions.open()) as other:
        other.commit(made)
    assert backend.inspect(Depth.THOROUGH) is not None
    resync(backend, plans)
    assert ground.chains() == chains
    ground.is_clean(backend, plans)


def test_clients_that_source_ranges_let_in_are_let_in_while_a_table_is_replaced(ground):
    """The kernel commits a set of ranges after the rest of a transaction: until then the rules are in effect."""
    plans = cluster("a", ingress=["198.51.100.1"], load_balancer_source_ranges=["172.16.0.0/24", "192.0.2.7/32"])
    ground.disturb("add table ip kube-proxy")
    backend, seen = ground.start(), []
    ground.after_commit = lambda: seen.append(ground.chains().get("source-ranges", []))
    resync(backend, plans)
    replaced, afterwards = seen[0], seen[-1]
    (number,) = {element.split(" . ")[0] for element in ground.elements(SetId.FIREWALL_ALLOW)}
    spelled_out = [
        f"ip daddr {number} ip saddr {span} goto source-allowed"
        for span in ("172.16.0.0-172.16.0.255", "192.0.2.7-192.0.2.7")
    ]
    assert replaced == [afterwards[0], *spelled_out, *afterwards[1:]]
    assert len(afterwards) == 3
    ground.is_clean(backend, plans)
