"""Our table for reading only: the input of an examination, without a way to change anything."""

from __future__ import annotations

from kubeproxy.backends.nftables.layout import TABLE, Layout, Packing
from kubeproxy.backends.table_view import TableView
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.model.addresses import Family


class NftablesView(TableView):
    """Our table in the network namespace of a socket."""

    def __init__(self, family: Family, link: Netlink) -> None:
        ranges = {name for name, shape in Layout(family).shapes.items() if shape.kind is Packing.INTERVAL}
        super().__init__(family, TABLE, ranges, link)
