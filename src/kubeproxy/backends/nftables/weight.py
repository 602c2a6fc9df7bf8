"""How many elements plans are in our table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubeproxy.backends.mode import Weight
from kubeproxy.backends.nftables.numbering import Numbers
from kubeproxy.backends.nftables.render import place_all, translate
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals, Pool, ServiceName, ServicePlan


class _Scale:
    """A recipient of elements that counts them: what Services share once."""

    def __init__(self) -> None:
        self._entries: set[tuple[str, bytes]] = set()
        self._members = 0

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:  # noqa: ARG002 - see render.Recipient
        self._entries.add((set_id, key))

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:  # noqa: ARG002 - see render.Recipient
        self._members += len(pool)

    @property
    def count(self) -> int:
        return len(self._entries) + self._members


def weigh(
    world: Globals,  # noqa: ARG001 - see backends.mode.Weigh
    family: Family,
    wanted: Mapping[ServiceName, tuple[ServicePlan, ...]],
    local: Sequence[bytes],  # noqa: ARG001
) -> Weight:
    """See backends.mode.Weigh."""
    scale, numbers = _Scale(), Numbers()
    for plans in wanted.values():
        for item in place_all([plan for plan in plans if plan.key.family is family], (), numbers):
            translate(item, scale)
    return Weight(scale.count, "elements")
