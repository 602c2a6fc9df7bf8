"""Samples every few seconds: the proxy's process, its tables, the kernel's memory, the delay of changes."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import memory
from kubeproxy.kernel.ipvs import Ipvs
from kubeproxy.kernel.netlink.protocol import Netlink, attributes, messages, text_attribute
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_SET, SUBSYSTEM
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.xtables.xtables_lock import TableInfo
from kubeproxy.model.addresses import Family

Sample = dict[str, float]
"""Figures by name. `at` is the time in seconds since the first sample."""

METRICS: Final = "http://127.0.0.1:10249/metrics"
IPVS: Final = "ipvs"
"""The mode that runs in a guest."""
_NEW_SET: Final = SUBSYSTEM << 8 | 9  # NFT_MSG_NEWSET
_SET_COUNT: Final = 20  # NFTA_SET_COUNT, since Linux 6.16
_NF_IPV4: Final = 2  # NFPROTO_IPV4
_LATENESS: Final = re.compile(
    r"^kubeproxy_network_programming_duration_seconds_(sum|count)\{.*?\} ([0-9.e+-]+)$", re.MULTILINE
)


def process(pid: int) -> Sample:
    """Return memory in MB, and the numbers of descriptors, threads and further processes."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]) / 1024,
        "anonymous": int(status["RssAnon"].split()[0]) / 1024,
        "descriptors": float(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())),
        "threads": float(status["Threads"]),
        "children": float(len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())),
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    return time.clock_gettime((~pid << 3) | 2)  # clock of a process: see clock_getcpuclockid(3)


def machine() -> Sample:
    """Return the kernel's memory for tables in MB, of the whole machine; and the number of tracked connections."""
    tracked = Path("/proc/sys/net/netfilter/nf_conntrack_count")
    return {
        "slab": memory.kmalloc("kmalloc-cg-") / 2**20,
        "vmalloc": memory.machine()["VmallocUsed"] / 1024,
        "tracked": float(tracked.read_text()) if tracked.exists() else 0.0,
    }


def lateness() -> tuple[float, float]:
    """Return the sum of the seconds from changes to their rules in the kernel, and the number of changes, so far."""
    with urllib.request.urlopen(METRICS, timeout=30) as answer:
        text = answer.read().decode()
    found = {"sum": 0.0, "count": 0.0}
    for name, value in _LATENESS.findall(text):
        found[name] += float(value)
    return found["sum"], found["count"]


def set_elements(table: str) -> float:
    """Return the number of elements of all named sets and maps of a table, as counted by the kernel;

    0 if the kernel does not report it, as before Linux 6.16.
    """
    total = 0
    with Netlink.open() as link:
        request = GENERIC.pack(_NF_IPV4, 0, 0) + text_attribute(nfta.SET_TABLE, table)
        # No set is created or deleted, so a dump that was interrupted by changes of elements contains all sets.
        for data in link.dump_once(GET_SET, request, "sets"):
            for each in messages(data):
                if each.kind != _NEW_SET:
                    continue
                found = {k: data[s:e] for k, s, e in attributes(data, each.start + GENERIC.size, each.end)}
                total += int.from_bytes(found.get(_SET_COUNT, b""), "big")
    return float(total)


def legacy_entries() -> float:
    """Return the number of entries in the table nat of legacy iptables."""
    table = TableInfo.open(Family.IPV4)
    try:
        return float(table.info("nat")[-2])
    finally:
        table.close()


def nft_rules() -> float:
    """Return the number of rules in the table nat of iptables-nft."""
    with TableReader(_NF_IPV4, "nat", Netlink.open()) as reader:
        return float(len(reader.rules()))


def real_servers() -> float:
    """Return the number of real servers of all virtual servers of IPVS."""
    with Ipvs.open() as asked:
        return float(sum(len(asked.destinations(server.key)) for server in asked.servers()))


COUNTED: Final[dict[str, tuple[str, Callable[[], float]]]] = {
    "nftables": ("elements", lambda: set_elements("kube-proxy")),
    "userspace": ("elements", lambda: set_elements("kube-proxy-userspace")),
    "iptables-legacy": ("rules", legacy_entries),
    "iptables-nft": ("rules", nft_rules),
    IPVS: ("servers", real_servers),
}
"""The function that counts the parts of each mode's tables."""
