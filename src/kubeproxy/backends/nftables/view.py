"""Our table as one may look at it who must not write: what an examination reads, and no way to change anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kubeproxy.backends.nftables.layout import TABLE, Kind, Layout
from kubeproxy.backends.table_view import ElementsView, TableView
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.tables import TableContents
from kubeproxy.model.addresses import Family


class View(ElementsView, Protocol):
    """One family's table, to be read. All calls raise ApplyError."""

    def header(self) -> nfnetlink.TableHeader | None:
        """Return the table's handle, comment and state, None when it is missing."""

    def sets(self) -> Collection[str]:
        """Return the names of sets and maps."""

    def contents(self) -> TableContents:
        """Return all of the table but the elements of its named sets."""


class KernelView(TableView):
    """Our table in the network namespace of a socket."""

    def __init__(self, family: Family, link: Netlink) -> None:
        ranges = {name for name, shape in Layout(family).shapes.items() if shape.kind is Kind.INTERVAL}
        super().__init__(family, TABLE, ranges, link)
