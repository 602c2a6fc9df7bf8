"""Elements to netlink messages: the contents of one transaction, packed as they are added. Pure.

The hot path of a full sync, so a pool of endpoints is packed at C speed, as one piece; the pieces of a set are cut
into messages only at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from operator import add

from kubeproxy.backends.nftables.layout import (
    ENDPOINT_MAPS,
    TABLE,
    ChainName,
    Kind,
    Layout,
    parse_chain_name,
    slot_bytes,
)
from kubeproxy.kernel.nftables.elements import Packer, goto_frame, interval_element
from kubeproxy.kernel.nftables.nfnetlink import DELETE_ELEMENT, NEW_ELEMENT, element_messages
from kubeproxy.model.plan import Pool

Users = dict[str, Counter[bytes]]
"""How many Services ask for each element of a shared set."""

_VERDICTS = 4096
"""Chains whose verdicts are kept packed: chains of ever new timeouts come and go."""

_VERDICT, _INTERVAL = Kind.VERDICT, Kind.INTERVAL

_PAD = b"\0\0"  # after the two bytes of a port, to a whole register


class Packers:
    """How the elements of each set of a family are packed."""

    def __init__(self, layout: Layout) -> None:
        self.family = layout.family
        self.kinds = {set_id: shape.kind for set_id, shape in layout.shapes.items()}
        sizes = self._key_sizes = {set_id: s.key_size(layout.family) for set_id, s in layout.shapes.items()}
        self.new = {
            set_id: Packer.of(sizes[set_id], shape.data_size(layout.family)) for set_id, shape in layout.shapes.items()
        }
        plain = [set_id for set_id, kind in self.kinds.items() if kind is Kind.PLAIN]
        self.before_plain = {set_id: self.new[set_id].before_key for set_id in plain}
        self.old = {set_id: Packer.of(size, 0) for set_id, size in sizes.items()}
        self._verdicts: dict[tuple[str, bytes], tuple[bytes, bytes]] = {}
        self._slots: dict[str, list[bytes]] = {set_id: [] for set_id in ENDPOINT_MAPS}

    def verdict(self, set_id: str, chain: bytes) -> tuple[bytes, bytes]:
        """Return what comes before and after the key in an element whose verdict is to go to a chain."""
        found = self._verdicts.get((set_id, chain))
        if found is None:
            if len(self._verdicts) >= _VERDICTS:
                self._verdicts.clear()
            found = self._verdicts[set_id, chain] = goto_frame(self._key_sizes[set_id], chain)
        return found

    def slots(self, set_id: str, count: int) -> list[bytes]:
        """Return slot numbers with the bytes that follow a key, for at least `count` slots."""
        slots = self._slots[set_id]
        if len(slots) < count:
            between = self.new[set_id].before_data
            slots[:] = [slot + between for slot in slot_bytes(count)]
        return slots


class Transaction:
    """What one transaction removes and adds. `elements` counts both.

    As the recipient of render.translate it takes what is new; what is shared is added for its first user only.
    """

    def __init__(self, packers: Packers, users: Users, asked: Iterable[tuple[str, bytes]] = ()) -> None:
        self.elements = 0
        self._packers = packers
        self._users = users
        self._before_plain = packers.before_plain
        self._added: defaultdict[str, list[bytes]] = defaultdict(list)
        self._removed: defaultdict[str, list[bytes]] = defaultdict(list)
        self._verdicts: set[bytes] = set()
        self.asked = set(asked)
        """What is shared and the Service at hand has asked for, maybe in the transaction before."""

    def next_service(self) -> None:
        """Say that what follows is another Service's: each counts once, however many of its ports share an element."""
        self.asked.clear()

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:
        """Add an element that a Service asks for, unless another one has it there already."""
        users = self._users.get(set_id)
        if users is not None:
            if (set_id, key) in self.asked:
                return
            self.asked.add((set_id, key))
            users[key] = known = users.get(key, 0) + 1
            if known > 1:
                return
        before = self._before_plain.get(set_id)
        if before is None:
            self.add(set_id, key, data)
            return
        self._added[set_id].append(before + key)  # nearly all that are no pools
        self.elements += 1

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:
        """Add the endpoints of a frontend."""
        head = self._packers.new[set_id].before_key + key
        pieces = map(add, self._packers.slots(set_id, len(pool)), pool)
        self._added[set_id].append(head + (_PAD + head).join(pieces) + _PAD)
        self.elements += len(pool)

    def add(self, set_id: str, key: bytes, data: bytes) -> None:
        """Add an element."""
        kind = self._packers.kinds[set_id]
        if kind is _VERDICT:
            head, tail = self._packers.verdict(set_id, data)
            self._verdicts.add(data)
            packed = head + key + tail
        elif kind is _INTERVAL:
            packed = interval_element(key)
        else:
            packed = self._packers.new[set_id].pack(key, data)
        self._added[set_id].append(packed)
        self.elements += 1

    def remove(self, set_id: str, key: bytes) -> None:
        """Remove an element."""
        interval = self._packers.kinds[set_id] is _INTERVAL
        packed = interval_element(key) if interval else self._packers.old[set_id].pack(key, b"")
        self._removed[set_id].append(packed)
        self.elements += 1

    def release(self, set_id: str, key: bytes) -> None:
        """Remove an element that a Service asked for, unless another one still does."""
        users = self._users.get(set_id)
        if users is not None:
            users[key] -= 1
            if users[key] > 0:
                return
            del users[key]
        self.remove(set_id, key)

    def chains(self) -> set[ChainName]:
        """Return the chains that added verdicts go to."""
        return chain_names(self._verdicts)

    def messages(self) -> list[bytes]:
        """Return the messages: removals first, as an element that changes its data is both."""
        return [*self._messages(DELETE_ELEMENT, self._removed), *self._messages(NEW_ELEMENT, self._added)]

    def _messages(self, kind: int, sets: dict[str, list[bytes]]) -> Iterator[bytes]:
        for set_id, pieces in sets.items():
            fixed = (
                0 if self._packers.kinds[set_id] is Kind.VERDICT and kind == NEW_ELEMENT else self._size(set_id, kind)
            )
            yield from element_messages(kind, self._packers.family, TABLE, set_id, pieces, fixed)

    def _size(self, set_id: str, kind: int) -> int:
        """Return the bytes of an element; those of a set are all alike, but for verdicts."""
        if self._packers.kinds[set_id] is Kind.INTERVAL:
            return 0
        packer = self._packers.new[set_id] if kind == NEW_ELEMENT else self._packers.old[set_id]
        return packer.size


def chain_names(verdicts: Iterable[bytes]) -> set[ChainName]:
    """Return the chains that verdicts go to."""
    found = (parse_chain_name(verdict.decode()) for verdict in verdicts)
    return {name for name in found if name is not None}
