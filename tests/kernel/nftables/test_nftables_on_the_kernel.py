"""Runs the backend's tests for the fake kernel on the real one."""

from unit.backends.nftables.test_nftables_adoption import *  # noqa: F403
from unit.backends.nftables.test_nftables_affinity import *  # noqa: F403
from unit.backends.nftables.test_nftables_contents import *  # noqa: F403
from unit.backends.nftables.test_nftables_drift import *  # noqa: F403
from unit.backends.nftables.test_nftables_elements import *  # noqa: F403
from unit.backends.nftables.test_nftables_examine import *  # noqa: F403
from unit.backends.nftables.test_nftables_gone import *  # noqa: F403
from unit.backends.nftables.test_nftables_handover import *  # noqa: F403
from unit.backends.nftables.test_nftables_ranges import *  # noqa: F403
from unit.backends.nftables.test_nftables_syncs import *  # noqa: F403
