"""The kernel under the tested nftables backend: a fake kernel, or the real one in a separate network namespace.

A test with the fixture `ground` runs on both. On the real kernel `nft` lists the contents, so the reader under test
does not check itself.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from kubeproxy.backends.mode import Backend, Depth, ForeignChange
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import CLIENTS, NUMBER_MAPS, RANGE_MAPS, TABLE, VERDICT_MAPS, SetId
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import NamedPlans, Plans
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.changes import monitor_table
from kubeproxy.kernel.nftables.elements import Element
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals
from support import nft
from support.cluster_objects import NODE_IPS
from support.fake_nftables import FakeKernel, listing
from support.nftables_plans import V4, WORLD
from support.own_network import own_network

Contents = dict[str, set[str]]
"""Elements by set or map, as nft writes them: 'a . b', or 'a . b : c'; ranges as 'a-b'."""


def resync(backend: Backend, plans: Plans) -> int:
    """Resync; return the number of changed elements."""
    return sum(backend.resync(plans))


def sync(backend: Backend, *changes: NamedPlans) -> int:
    """Sync; return the number of changed elements."""
    return sum(backend.sync(changes))


class Ground(ABC):
    """A kernel, and the functions with which tests examine it.

    A backend's action calls the callback of the same name.
    """

    counts = True
    """Whether the kernel counts the elements of a set (since Linux 6.16)."""

    def __init__(self) -> None:
        self.before_commit: Callable[[], None] = lambda: None
        self.after_commit: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None
        self.calls: list[str] = []
        self._open = ExitStack()
        self._under: dict[NftablesBackend, Interposed] = {}

    def close(self) -> None:
        """Close the backends."""
        self._open.close()

    def start(self, world: Globals = WORLD, family: Family | None = None) -> NftablesBackend:
        """Return a backend for a family (default: the only family of the world)."""
        if family is None:
            (family,) = world.families
        under: Any = Interposed(self.table(family), self)
        backend = self._open.enter_context(closing(NftablesBackend(under, world)))
        self._under[backend] = under
        return backend

    @abstractmethod
    def table(self, family: Family) -> KernelTable:
        """Return a family's table."""

    @abstractmethod
    def disturb(self, *lines: str) -> None:
        """Execute text in one transaction, as another program."""

    @abstractmethod
    def disturb_unheard(self, *lines: str) -> None:
        """Execute text as another program, without an announcement of the transaction to this process."""

    @abstractmethod
    def contents(self, family: Family = V4) -> Contents:
        """Return the elements of all sets and maps of the proxy's table, without the placeholder of affinity."""

    @abstractmethod
    def chains(self, family: Family = V4) -> dict[str, list[str]]:
        """Return the rules of each chain of the proxy's table, as text."""

    @abstractmethod
    def rule_handles(self) -> tuple[int, ...]:
        """Return the handles of the rules of the proxy's IPv4 table."""

    @abstractmethod
    def tables(self) -> set[str]:
        """Return the names of all tables, each with its family."""

    # -- for both kernels --------------------------------------------------------------------------------------------

    def elements(self, name: str, family: Family = V4) -> set[str]:
        """Return the elements of one set or map."""
        return self.contents(family).get(name, set())

    def count(self, name: str, family: Family = V4) -> int:
        """Return the number of elements of one set or map."""
        return len(self.elements(name, family))

    def verdicts(self, family: Family = V4) -> int:
        """Return the number of elements with verdicts."""
        return sum(self.count(name, family) for name in VERDICT_MAPS)

    def generation(self) -> int:
        """Return the number of transactions."""
        with closing(self.table(V4)) as table:
            return table.generation()

    def header(self, family: Family = V4) -> nfnetlink.TableHeader | None:
        """Return the handle, comment and state of the proxy's table."""
        with closing(self.table(family)) as table:
            return table.header()

    def packed(self, name: str, family: Family = V4) -> list[Element]:
        """Return the elements of one set or map as the kernel stores them."""
        with closing(self.table(family)) as table:
            return list(table.elements(name))

    def is_clean(self, backend: NftablesBackend, plans: Plans) -> None:
        """Check that no other program has changed anything, and that a second inspection changes nothing."""
        assert not self.is_touched(backend)
        assert self.difference(backend) is None
        header = self.header(backend.family)
        assert resync(backend, plans) == 0
        assert self.header(backend.family) == header
        assert self.difference(backend) is None

    def is_touched(self, backend: NftablesBackend) -> bool:
        """Return whether a backend has to inspect the table, because another program committed a transaction."""
        self.calls.clear()
        backend.inspect(Depth.QUICK)
        return self.calls != ["changes"]

    def difference(self, backend: NftablesBackend) -> ForeignChange | None:
        """Return the reason why a backend has to read everything."""
        self._under[backend].mark_incomplete()
        return backend.inspect(Depth.THOROUGH)


class Interposed:
    """A table of a ground that calls the ground before and after its operations."""

    def __init__(self, table: KernelTable, ground: Ground) -> None:
        self.family = table.family
        self._table = table
        self._ground = ground

    def __getattr__(self, name: str) -> Any:
        self._ground.calls.append(name)
        if name not in ("close", "room"):
            self._ground.before_read()
        return getattr(self._table, name)

    def commit(self, messages: Sequence[bytes]) -> None:
        self._ground.before_commit()
        self._table.commit(messages)
        self._ground.after_commit()


class FakeGround(Ground):
    """The fake kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = FakeKernel()

    @classmethod
    @contextmanager
    def fresh(cls) -> Iterator[FakeGround]:
        """Return a ground without any table."""
        with closing(cls()) as ground:
            yield ground

    def table(self, family: Family) -> KernelTable:
        return self.kernel.open(family)

    def disturb(self, *lines: str) -> None:
        self.kernel.disturb("\n".join(lines))

    def disturb_unheard(self, *lines: str) -> None:
        self.kernel.run("\n".join(lines))
        for family, heard in self.kernel.heard.items():
            self.kernel.heard[family] = heard._replace(complete=False)

    def contents(self, family: Family = V4) -> Contents:
        return _without_mark(listing.contents(self.kernel, family))

    def chains(self, family: Family = V4) -> dict[str, list[str]]:
        return listing.chains(self.kernel, family)

    def rule_handles(self) -> tuple[int, ...]:
        return tuple(rule.handle for chain in self.kernel.table(V4).chains.values() for rule in chain.rules)

    def tables(self) -> set[str]:
        return {f"{family} {name}" for family, name in self.kernel.tables}


class KernelGround(Ground):
    """The real kernel."""

    counts = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 16)

    @classmethod
    @contextmanager
    def fresh(cls) -> Iterator[KernelGround]:
        """Return a separate network namespace."""
        with own_network(), closing(cls()) as ground:
            yield ground

    def table(self, family: Family) -> KernelTable:
        return KernelTable.open(family)

    def disturb(self, *lines: str) -> None:
        nft.run("\n".join(lines) + "\n")

    def disturb_unheard(self, *lines: str) -> None:
        others = monitor_table(TABLE)
        with closing(others), closing(self.table(V4)) as table, others.paused(table.generation):
            self.disturb(*lines)

    def contents(self, family: Family = V4) -> Contents:
        """See Ground. Read again if an element is repeated: the kernel is resizing a hash table then."""
        deadline = time.monotonic() + 20
        while True:
            listed = _listed(family)
            distinct = {name: set(elements) for name, elements in listed.items()}
            if all(len(distinct[name]) == len(elements) for name, elements in listed.items()):
                return _without_mark(distinct)
            assert time.monotonic() < deadline, "nft repeats elements"
            time.sleep(0.01)

    def chains(self, family: Family = V4) -> dict[str, list[str]]:
        bodies = re.findall(r"^\tchain (\S+) \{\n(.*?)^\t\}", list_table(family), re.MULTILINE | re.DOTALL)
        return {name: [line.strip() for line in body.splitlines()] for name, body in bodies}

    def rule_handles(self) -> tuple[int, ...]:
        with TableReader(V4, TABLE, Netlink.open()) as reader:
            return tuple(rule.handle for rule in reader.rules())

    def tables(self) -> set[str]:
        return {line.removeprefix("table ") for line in _nft("list", "tables").splitlines()}


def list_table(family: Family, *options: str) -> str:
    """Return nft's listing of the proxy's table."""
    return _nft(*options, "list", "table", "ip" if family is V4 else "ip6", TABLE)


def _nft(*arguments: str) -> str:
    return subprocess.run(["nft", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def _listed(family: Family) -> dict[str, list[str]]:
    entries = json.loads(list_table(family, "-j"))["nftables"]
    sets = (entry[kind] for entry in entries for kind in ("set", "map") if kind in entry)
    return {found["name"]: [_element(element) for element in found.get("elem", ())] for found in sets}


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, timeout=10)


@contextmanager
def ground_with_ways_out(family: Family) -> Iterator[KernelGround]:
    """Return the real kernel in a separate network, in which packets to any address have a route."""
    with KernelGround.fresh() as ground:
        ip("link", "set", "lo", "up")
        ip("addr", "add", NODE_IPS[family], "dev", "lo", *(["nodad"] if family is Family.IPV6 else []))
        ip(f"-{'4' if family is Family.IPV4 else '6'}", "route", "add", "default", "dev", "lo")
        yield ground


def _element(element: Any) -> str:
    return " : ".join(map(_words, element)) if isinstance(element, list) else _words(element)


def _words(value: Any) -> str:
    match value:
        case {"goto": {"target": target}}:
            return f"goto {target}"
        case {"concat": parts}:
            return " . ".join(map(_words, parts))
        case {"elem": {"val": inner}}:
            return _words(inner)
        case {"prefix": {"addr": address, "len": length}}:
            network = ipaddress.ip_network(f"{address}/{length}")
            return f"{network[0]}-{network[-1]}"
        case {"range": [first, last]}:
            return f"{first}-{last}"
        case _:
            return str(value)


def _without_mark(contents: Contents) -> Contents:
    """Leave out the placeholder element of session affinity; see affinity.NumberMark."""
    clients = {element for element in contents.get(CLIENTS, ()) if not element.startswith("4294967295 . ")}
    return contents | ({CLIENTS: clients} if CLIENTS in contents else {})


def without_slots(contents: Contents) -> dict[str, object]:
    """Return the elements without the order of endpoints: the slot of an endpoint depends on the history, the set of
    slots does not.

    Of the numbers of pools, endpoints and lists of source ranges only equality matters: which frontends share one.
    """
    result: dict[str, object] = {"pools": _same_numbers(contents)}
    lists: dict[str, list[str]] = {}
    for numbered in (*NUMBER_MAPS, *RANGE_MAPS):
        for element in sorted(contents.get(numbered, ())):
            frontend, _, number = element.partition(" : ")
            lists.setdefault(number, []).append(f"{numbered} {frontend}")
    numbers = {number: str(sorted(frontends)) for number, frontends in lists.items()}
    endpoints = dict(element.split(" : ") for element in contents.get(SetId.SESSION_ENDPOINTS, ()))
    endpoints = {key.split(" . ")[0]: f"{key.split(' . ')[1]} {data}" for key, data in endpoints.items()}
    for name, elements in contents.items():
        if name in {SetId.FIREWALL_ALLOW, SetId.SESSION_CLASSES}:
            parts = (element.replace(" : ", " . ").split(" . ") for element in elements)
            result[name] = sorted(f"{numbers.get(number, number)} . {rest}" for number, *rest in parts)
        elif name == SetId.SESSION_OWN:
            parts = (element.split(" . ", 1) for element in elements)
            result[name] = sorted(f"{endpoints.get(number, number)} . {rest}" for number, rest in parts)
        elif name == SetId.SESSION_SLOTS:
            parts = (element.replace(" : ", " . ").split(" . ") for element in elements)
            result[name] = _pools(
                {f"{numbers.get(pool)} . {slot} : {endpoints.get(each)}" for pool, slot, each in parts}
            )
        elif name in {*NUMBER_MAPS, *RANGE_MAPS, SetId.SESSION_ENDPOINTS, CLIENTS}:
            continue
        elif name == SetId.RANGE_ENDPOINTS:
            parts = (element.split(" : ") for element in elements)
            result[name] = sorted(f"{endpoints.get(number)} {address}" for number, address in parts)
        elif name == SetId.RANGE_CHAINS:
            parts = (element.split(" : ") for element in elements)
            result[name] = sorted(f"{numbers.get(number)} {chain}" for number, chain in parts)
        elif not name.endswith("endpoints") or name == "hairpin-endpoints":
            result[name] = elements
        else:
            result[name] = _pools(elements)
    return result


def _pools(elements: set[str]) -> dict[str, tuple[set[str], list[str]]]:
    """Return the slots and the sorted destinations of each frontend."""
    pools: dict[str, tuple[set[str], list[str]]] = {}
    for element in elements:
        key, _, destination = element.partition(" : ")
        frontend, _, slot = key.rpartition(" . ")
        slots, destinations = pools.setdefault(frontend, (set(), []))
        slots.add(slot)
        destinations.append(destination)
    return {frontend: (slots, sorted(found)) for frontend, (slots, found) in pools.items()}


def _same_numbers(contents: Contents) -> set[frozenset[str]]:
    pools: dict[str, set[str]] = {}
    for name in (*NUMBER_MAPS, *RANGE_MAPS):
        for element in contents.get(name, ()):
            frontend, _, number = element.partition(" : ")
            pools.setdefault(number, set()).add(f"{name} {frontend}")
    return set(map(frozenset, pools.values()))
