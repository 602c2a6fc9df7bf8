"""The world of a history: a cluster of the lab with one proxy and steady traffic; implements the steps."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from resource import RLIMIT_AS, RLIMIT_FSIZE, RLIMIT_NOFILE, prlimit
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from lab.apiserver.server import ServerConfig
from lab.apiserver.watching import Watch
from lab.cluster import ClusterConfig, LabCluster
from lab.netns import threads_in
from lab.proxyprocess import Process, spawn
from lab.topology import NODE_A
from prove import launcher
from prove.forking import Forking
from prove.steps import Json, Step, copied
from support import traffic as traffic_module
from support.foreign import go_start, load_iptables, load_nft
from support.live import TIMEOUT, Front, Live, leftovers
from support.modes import GUEST, MODES
from support.traffic import DUAL, Stream, Traffic

T = TypeVar("T")

RESOURCES = ("services", "endpointslices", "servicecidrs")
NO_FAULTS: Json = {
    **dict.fromkeys(("fail", "reset", "cut_watch", "garbage_watch", "gone"), 0),
    "delay": 0.0,
    "stall_watch": False,
    "fail_watch_list": False,
}
SYNC_PERIOD = {"nftables": "10s"}
"""The interval of comparisons; nftables mode detects other programs' changes by the number of transactions, other modes
compare within 2 s."""
UDP_IDLE = 1.0
"""Seconds after which userspace mode forgets a UDP client."""
PAUSE = 0.2 if GUEST else 0.08
"""Seconds between two requests of a stream of steady traffic."""
CLOSE = PAUSE / 8
"""The same from the start of a proxy until it has settled: rules in the wrong order close a Service for some 30 ms."""
FIRST = 3
"""Number of answered requests after which a stream counts as working."""
ASKERS = 12
"""Number of threads that may send requests from one place at the same time."""
FORGOTTEN = 1.0
"""Seconds until no tracked UDP flow leads to a listener of an ended proxy."""
STEADY = "steady"
"""The Service of the steady traffic."""
HARMLESS = {"clock-back", "clock-ahead", "short-reads"}
"""Faults that must not end a proxy."""
STARVED = {"memory": RLIMIT_AS, "descriptors": RLIMIT_NOFILE, "disk": RLIMIT_FSIZE}
"""Resources that the proxy may lack: memory, descriptors, or room in files (its log)."""
FIRST_REVISION, BEHIND = 10_000_000, 2_000
"""How far an older server, and another cluster's server, is behind: if it caught up before the first watch, no watch
could detect the change."""
REAL = 20
"""One of this number of starts runs the real command."""
BATCHES = 0, 2
"""Elements from which every second proxy commits a transaction, so that a transaction has few Services; 0 for the
proxy's own number."""
FAR = {"IPv4": "10.244.{}.{}", "IPv6": "fd00:244::{:x}:{:x}"}
"""Endpoints that are not pods of the lab: nothing answers there."""


class Shares(NamedTuple):
    """The share of quiet moments at which the most expensive judges run."""

    dumps: float = 1.0
    pages: float = 1.0
    meanings: float = 1.0


class World:
    """An async context manager. `far` are packed addresses at which nothing answers."""

    def __init__(self, mode: str) -> None:
        server = ServerConfig(bookmark_period=0.5)
        self.mode = MODES[mode]
        self.live = Live(LabCluster(ClusterConfig(server=server)), self.mode)
        self.args: tuple[str, ...] = ()
        self.starts = 0
        self.judged = 0
        self.shares = Shares()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self.traffic: Traffic | None = None
        self.harmed = False
        self.mixed = False
        """Whether rules of other modes may be left, which the running mode must remove."""
        self.may_end = False
        self.baseline: dict[str, int] = {}
        self._own: dict[str, set[Any]] = {}
        self._saved: dict[str, list[Json]] = {}
        self._saved_at = 0
        self._forgets = False
        self._hungry: list[tuple[int, int, tuple[int, int]]] = []
        self._node: Json | None = None
        self.configured: Json = {}
        self.answered: dict[tuple[str, str, str], str] = {}
        """The endpoints that answered clients with session affinity, by Service, place and address."""
        self.launched = False
        """Whether the launcher started the proxy."""
        self.added: set[str] = set()
        """Addresses that were added to the node."""
        self._made_in = self.mode
        mutation = os.environ.get(launcher.MUTATION, "")
        self._forking = Forking(self.live.cluster.topology.node(NODE_A), mutation)

    async def __aenter__(self) -> Self:
        await self.live.cluster.__aenter__()
        # The lock is shared by all namespaces, and other programs of this machine must not affect this world.
        os.environ["XTABLES_LOCKFILE"] = str(self._lock_file)
        try:
            self.live.cluster.spawn = self._spawn
            await self._forking.__aenter__()
            await self.live.choose_variant(self.mode.variant)
            await self.live.add_pods()
            self.store.revision += FIRST_REVISION
            self.live.service(STEADY, "a1 a2 b1", type="NodePort", **DUAL)
            self._tell_only_watches()
            self._own = {r: {record.key for record in self.store.records(r)} for r in RESOURCES}
            await self.start()
            await self.settle_traffic()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(AssertionError):
            await self.stop_traffic()
        await self._end()
        left = leftovers(self.live)
        if left and error is None:
            raise AssertionError(f"left behind: {left}")

    @property
    def _lock_file(self) -> Path:
        return self.live.cluster.folder / "xtables.lock"

    async def inside(self, place: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, called by a thread in the network namespace of a place."""
        if place not in self._threads:
            self._threads[place] = threads_in(self.live.cluster.namespace_of(place), ASKERS)
        return await asyncio.get_running_loop().run_in_executor(self._threads[place], work)

    async def forked(self, call: str, argv: Sequence[str], output: Path) -> int:
        """Call `module:function` in a new process with the mutation; return its exit status."""
        process = await self._forking.start(call, argv, str(output))
        return await process.wait()

    async def _end(self) -> None:
        os.environ.pop("XTABLES_LOCKFILE", None)
        try:
            for threads in self._threads.values():
                await asyncio.to_thread(threads.shutdown)
        finally:
            try:
                await self.live.cluster.__aexit__(None, None, None)
            finally:
                await self._forking.__aexit__(None, None, None)

    async def _spawn(self, namespace: str, argv: Sequence[str], log: Path) -> Process:
        """Start a proxy, by fork if the launcher starts it."""
        given = len(launcher.COMMAND)
        if list(argv[:given]) == launcher.COMMAND:
            return await self._forking.start("prove.launcher:main", argv[given:], str(log))
        return await spawn(namespace, argv, log)

    @property
    def store(self) -> Any:
        """The API server's objects."""
        return self.live.cluster.store

    def _tell_only_watches(self) -> None:
        """Stop the lab's controllers, which expect valid objects: from now on only watches see changes."""
        for listeners in self.store._listeners.values():
            listeners[:] = [one for one in listeners if isinstance(getattr(one, "__self__", None), Watch)]

    # -- the proxy and its traffic --------------------------------------------------------------------------------

    async def start(self, *, wait: bool = True, by: Sequence[str] = ()) -> None:
        """Start a proxy, by the command `by` instead of the world's."""
        name = self.mode.name if self.mode.name in {"nftables", "ipvs"} else "iptables"
        block = {"syncPeriod": SYNC_PERIOD.get(name, "2s"), "minSyncPeriod": "1ms" if name == "iptables" else "0s"}
        overrides = dict(self.mode.config) | {name: block, "clientConnection": {"qps": -1}}
        if self.carries:
            overrides["udpIdleTimeout"] = f"{UDP_IDLE:g}s"
        overrides |= self.configured
        self.starts += 1
        if not by and (self.starts % REAL != 1 or launcher.MUTATION in os.environ):
            by = launcher.command(batch=BATCHES[self.starts % 2])
        self.launched = bool(by)
        traffic_module.PAUSE = CLOSE
        # With a failing API server the start takes longer; the next quiet moment checks it.
        await self.live.start(overrides, self.args, by, ready_within=TIMEOUT if wait else None)

    def calm(self) -> None:
        """Return the steady traffic to its usual interval, because the proxy has settled."""
        traffic_module.PAUSE = PAUSE

    @property
    def carries(self) -> bool:
        """Return whether connections end with the proxy."""
        return self.mode.name == "userspace"

    async def settle_traffic(self) -> None:
        """Start the steady traffic unless it runs; none of its requests may fail."""
        if self.traffic is not None:
            return
        if self.carries:
            await asyncio.sleep(FORGOTTEN)
        live = self.live
        node4, node6 = live.front(STEADY, "nodeport"), live.front(STEADY, "nodeport", "IPv6")
        cluster4, cluster6 = live.front(STEADY), live.front(STEADY, "cluster", "IPv6")
        streams = [
            Stream("outside", "tcp", node4),
            Stream("pod", "udp", cluster6),
            Stream("pod", "tcp", cluster4),
            Stream("node", "tcp", cluster4),
            Stream("outside", "lasting", node6),
            Stream("pod", "lasting", cluster4),
        ]
        self.traffic = await Traffic(live, *streams, first=FIRST).__aenter__()

    async def stop_traffic(self) -> list[str]:
        """End the steady traffic; return its failures."""
        traffic, self.traffic = self.traffic, None
        if traffic is None:
            return []
        failures = list(traffic.failures)
        await traffic.__aexit__(None, None, None)
        return failures

    def failures(self) -> list[str]:
        """Return the failures of the running steady traffic."""
        return list(self.traffic.failures) if self.traffic is not None else []

    # -- steps ----------------------------------------------------------------------------------------------------

    async def play(self, step: Step) -> None:
        """Do one step, without judging."""
        word, *given = step
        await getattr(self, f"_{word}")(*given)

    async def _put(self, resource: str, made: Json) -> None:
        self.store.put(resource, self._addressed(resource, made))

    async def _remove(self, resource: str, namespace: str, name: str) -> None:
        with suppress(KeyError):
            self.store.remove(resource, (namespace, name))

    async def _again(self) -> None:
        for resource in RESOURCES:
            for record in list(self.store.records(resource)):
                self.store.put(resource, record.decode())

    async def _no_node(self) -> None:
        """Delete the Node until the next quiet moment: the proxy must keep its last state."""
        if self._node is None:
            self._node = self.store.get("nodes", ("", "node-a")).decode()
            self.store.remove("nodes", ("", "node-a"))

    async def _zone(self, zone: str) -> None:
        if self._node is not None:
            self._node["metadata"]["labels"]["topology.kubernetes.io/zone"] = zone
            return
        node = self.store.get("nodes", ("", "node-a")).decode()
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] = zone
        self.store.put("nodes", node)

    async def _api(self, faults: Json) -> None:
        self.live.cluster.faults.update(faults)

    async def _drop(self) -> None:
        self.live.cluster.server.drop_connections()

    async def _compact(self) -> None:
        self.store.compact()
        self.live.cluster.server.drop_connections()

    async def _backup(self) -> None:
        self._saved_at = self.store.revision
        self._saved = {r: [record.decode() for record in self.store.records(r)] for r in RESOURCES}

    async def _restore(self, *, older: bool = False) -> None:
        """Restore older objects, without history: with newer revisions, as etcdutl does, or with `older` ones."""
        if not self._saved:
            return
        await self.live.cluster.server.refuse()
        for resource in RESOURCES:
            kept = set(map(_key, self._saved[resource]))
            for record in list(self.store.records(resource)):
                if record.key not in kept:
                    self.store.remove(resource, record.key)
        if older:  # Objects get other versions than before, with numbers that were used before.
            self.store.compact()
            self.store.revision = max(1, self._saved_at - BEHIND)
        for resource in RESOURCES:
            for made in self._saved[resource]:
                self.store.put(resource, copied(made))
        self.store.compact()
        await self.live.cluster.server.listen()

    async def _rollback(self) -> None:
        await self._restore(older=True)

    async def _elsewhere(self) -> None:
        """Replace the API server by that of another cluster: half of the objects, with other uids and lower revisions.

        The objects that the lab itself needs remain.
        """
        await self.live.cluster.server.refuse()
        others = {r: [record.decode() for record in self.store.records(r)] for r in RESOURCES}
        for resource, found in others.items():
            for record in list(self.store.records(resource)):
                self.store.remove(resource, record.key)
            own = [one for one in found if _key(one) in self._own[resource]]
            others[resource] = own + [one for one in found if one not in own][::2]
        self.store.compact()
        self.store.revision //= 2
        for resource, found in others.items():
            for one in found:
                one["metadata"]["uid"] = f"elsewhere-{one['metadata'].get('uid')}"
                one["metadata"].pop("resourceVersion", None)
                self.store.put(resource, one)
        self._saved = {}
        await self.live.cluster.server.listen()

    async def _away(self, forgets: bool) -> None:
        await self.live.cluster.server.refuse()
        self._forgets = forgets

    async def back(self) -> None:
        """Make the API server answer again, if it was away, and restore the objects that the proxy needs."""
        if self._forgets:
            self.store.compact()
        self._forgets = False
        self._feed()
        await self.live.cluster.server.listen()
        if self._node is not None:
            self.store.put("nodes", self._node)
            self._node = None

    async def _back(self) -> None:
        await self.back()

    async def _kill(self) -> None:
        await self._again_started(self.live.proxy.kill)

    async def _restart(self) -> None:
        await self._again_started(self.live.proxy.stop)

    async def _again_started(self, end: Any) -> None:
        if self.carries:
            await self.stop_traffic()
        await end()
        await self.start(wait=False)
        self.baseline.clear()

    async def _configure(self, fields: Json, args: Sequence[str]) -> None:
        """Restart the proxy with other fields of its configuration and other flags."""
        self.configured, self.args = fields, tuple(args)
        await self._again_started(self.live.proxy.stop)

    def settings(self) -> Step:
        """Return the step that gives a new world the present configuration and flags of this one."""
        return ("configure", self.configured, list(self.args))

    async def _switch(self, mode: str) -> None:
        """Kill the proxy, and start it in another mode."""
        carried = self.carries
        if carried or MODES[mode].name == "userspace":
            await self.stop_traffic()
        await self.live.proxy.kill()
        self.mode = self.live.mode = MODES[mode]
        if self.mode.variant and self.mode is not self._made_in:
            await self.live.cluster.exec("node", hint(self.mode.variant))
        await self.start(wait=False)
        self.baseline.clear()
        self.mixed = True

    async def _faulty(self, word: str, number: int) -> None:
        """Kill the proxy, and start it with a fault: it dies, or gets an error, at a later call into the kernel."""
        if self.carries:
            await self.stop_traffic()
        await self.live.proxy.kill()
        await self.start(wait=False, by=launcher.command(word, number))
        self.baseline.clear()
        self.may_end = word not in HARMLESS

    async def _foreign(self, kind: str) -> None:
        """Leave the rules of a Go kube-proxy, in iptables mode by the variant "nft" or "iptables"."""
        await self.live.proxy.kill()
        if kind == "nft":
            await load_nft(self.live, STEADY, go_start() if self.mode.name == "nftables" else "")
        else:
            await load_iptables(self.live, STEADY, "nft")
        await self.start(wait=False)
        self.baseline.clear()
        self.mixed = True

    async def _starve(self, what: str, seconds: float) -> None:
        """Limit a resource of the proxy (STARVED) to its present use for some seconds. The proxy may end, and is then
        started again."""
        if self.carries:
            await self.stop_traffic()
        pid, kind = self.live.proxy.pid, STARVED[what]
        with suppress(ProcessLookupError, FileNotFoundError):
            limits = prlimit(pid, kind)
            prlimit(pid, kind, (min(limits[1], _held(pid, what)), limits[1]))
            self._hungry.append((pid, kind, limits))
            asyncio.get_running_loop().call_later(seconds, self._feed)
            self.may_end = True

    def _feed(self) -> None:
        """Remove the limits of the proxy's resources."""
        while self._hungry:
            with suppress(ProcessLookupError):
                prlimit(*self._hungry.pop())

    async def _lock(self, seconds: float) -> None:
        """Let another program hold the lock of iptables for some seconds."""
        file = os.open(self._lock_file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        asyncio.get_running_loop().call_later(seconds, os.close, file)

    async def supervise(self) -> None:
        """Start the proxy again, like systemd, if it had a reason to end."""
        if self.may_end and self.live.proxy.returncode is not None:
            if self.carries:
                await self.stop_traffic()
            await self.start(wait=False)
            self.may_end = False

    async def _pause(self, seconds: float) -> None:
        if self.carries:
            await self.stop_traffic()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            if self.live.proxy.returncode is None:
                os.kill(self.live.proxy.pid, number)
            await asyncio.sleep(seconds if number is signal.SIGSTOP else 0)

    async def _harm(self, what: str) -> None:
        """Let another program change the proxy's rules; connections may fail until they are repaired."""
        before = await self.stop_traffic()
        if before:
            raise AssertionError(f"steady traffic: {before[0]}")
        self.harmed = True
        for command in harms(self.mode.name, self.mode.variant, what):
            await self.inside("node", functools.partial(subprocess.run, command, capture_output=True, check=False))

    async def _node_address(self, address: str, present: bool) -> None:
        """Add an address to the node, or remove it."""
        if present != (address in self.added):
            change = ["ip", "address", "add" if present else "delete", f"{address}/32", "dev", "eth0"]
            await self.live.run(*change)
            (self.added.add if present else self.added.discard)(address)

    async def _clear(self) -> None:
        await self.clear()

    async def clear(self) -> None:
        """Remove all objects of a history, and end all faults."""
        self.live.cluster.faults.update(NO_FAULTS)
        self._saved = {}
        self.answered.clear()
        for address in list(self.added):
            await self._node_address(address, present=False)
        await self.back()
        await self._zone("zone-a")
        for resource in RESOURCES:
            for record in list(self.store.records(resource)):
                if record.key not in self._own[resource]:
                    self.store.remove(resource, record.key)

    def _addressed(self, resource: str, made: Json) -> Json:
        """Return an object with addresses instead of pods' names."""
        made = copied(made)
        if resource != "endpointslices":
            return made
        family = "IPv6" if made.get("addressType") == "IPv6" else "IPv4"
        endpoints = made.get("endpoints")
        for endpoint in endpoints if isinstance(endpoints, list) else ():
            if isinstance(endpoint, dict) and isinstance(endpoint.get("addresses"), list):
                endpoint["addresses"] = [self._address(one, family) for one in endpoint["addresses"]]
        return made

    def _address(self, word: Any, family: str) -> Any:
        if isinstance(word, str) and word in self.live.ips:
            return self.live.ips[word][family]
        if isinstance(word, str) and word.startswith("+"):
            number = int(word[1:])
            return FAR[family].format(number % 2, 64 + number // 2)
        return word

    def front(self, address: str, port: int) -> Front:
        """Return the address of a frontend."""
        return Front(address, port)


def _held(pid: int, what: str) -> int:
    """Return a process's use of a limited resource, in the unit of the limit. Raises FileNotFoundError without the
    process."""
    if what == "memory":
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return len(list(Path(f"/proc/{pid}/fd").iterdir())) if what == "descriptors" else 0


def _key(made: Json) -> tuple[str, str]:
    return made["metadata"].get("namespace") or "", made["metadata"]["name"]


def hint(variant: str) -> list[str]:
    """Return the command that creates the hint for a variant of iptables, as a kubelet does."""
    return [f"iptables-{variant}", "-w", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]


def harms(mode: str, variant: str, what: str) -> list[list[str]]:
    """Return the commands by which another program changes the proxy's rules."""
    if mode in {"nftables", "userspace"}:
        table = ["ip", "kube-proxy" if mode == "nftables" else "kube-proxy-userspace"]
        stray = ["cluster-ips", "{ 10.96.99.99 }"]
        if mode == "userspace":
            stray = ["outside-services-dropped", "{ 10.96.99.99 . tcp . 80 }"]
        base = "{ type filter hook forward priority 5 ; policy drop ; }"
        return {
            "flush": [["nft", "flush", "table", *table]],
            "delete": [["nft", "delete", "table", *table]],
            "stray": [["nft", "add", "element", *table, *stray], ["nft", "add", "chain", *table, "stray", base]],
            "element": [["nft", "flush", "map", *table, "endpoints" if mode == "nftables" else "outside-services"]],
            "flush-chain": [["nft", "flush", "chain", *table, "nat-prerouting"]],
        }[what]
    command = [f"iptables-{variant}" if variant else "iptables", "-w"]
    rule = ["KUBE-NODEPORTS", "-p", "tcp", "-m", "tcp", "--dport", "1", "-j", "ACCEPT"]
    return {
        "flush": [[*command, "-t", "nat", "-F"]],
        "delete": [[*command, "-t", "filter", "-F", "KUBE-FORWARD"]],
        "stray": [[*command, "-t", "nat", "-A", *rule]],
        "element": [[*command, "-t", "nat", "-D", "KUBE-SERVICES", "1"]],
        "flush-chain": [[*command, "-t", "nat", "-F", "KUBE-POSTROUTING"]],
    }[what]
