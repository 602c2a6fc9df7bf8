"""nft's listing of the proxy's table is a valid ruleset."""

import pytest

from support import nft
from support.cluster_objects import world
from support.nftables_ground import list_table, resync
from support.nftables_plans import V4, V6, plans_of, sticky


@pytest.mark.parametrize("family", [V4, V6])
def test_the_listing_loads_again_elsewhere(new_ground, family):
    globals_ = world(families=[family])
    plans = {
        ("default", "a"): plans_of("a", 1, globals_=globals_),
        ("default", "b"): sticky("b", 2, 2, globals_=globals_),
    }
    with new_ground() as ground:
        resync(ground.start(globals_), plans)
        text = list_table(family)
        contents, chains = ground.contents(family), ground.chains(family)
    with new_ground() as elsewhere:
        nft.run(text)
        assert (elsewhere.contents(family), elsewhere.chains(family)) == (contents, chains)
