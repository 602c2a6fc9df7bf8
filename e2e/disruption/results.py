"""Records the failed requests of each disruption in JSON files by program and mode; renders docs/disruption.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from e2e.results import RESULTS, save
from kubeproxy.wording import counted

FOLDER: Final = RESULTS / "disruption"
PAGE: Final = Path(__file__).parents[2] / "docs/disruption.md"


class Count(msgspec.Struct, frozen=True):
    """Requests of one kind of traffic: sent, failed, and the longest time without an answer in milliseconds."""

    asked: int
    failed: int
    gap: int


class Row(msgspec.Struct, frozen=True):
    """A disruption: its duration in seconds, counts by kind of traffic, and a line for each client that failed."""

    title: str
    seconds: int
    counts: dict[str, Count]
    failures: list[str]


class Record(msgspec.Struct):
    """A run: program (ours or go), mode, day, commit, versions, and a row for each disruption."""

    proxy: str
    mode: str
    date: str
    commit: str
    versions: dict[str, str]
    rows: list[Row]


def write(record: Record, folder: Path = FOLDER) -> Path:
    """Write a run's file, which replaces the previous one of this program and mode; return its path."""
    return save(record, folder / f"{record.proxy}-{record.mode}.json")


def read(folder: Path = FOLDER) -> list[Record]:
    """Read all runs of a folder."""
    return [msgspec.json.decode(path.read_bytes(), type=Record) for path in sorted(folder.glob("*.json"), reverse=True)]


_HEAD: Final = """# Disruptions

Clients continuously send requests to Services of a real cluster while parts of the cluster are replaced, killed or
restarted. The cluster has kube-apiserver, and kubelet and containerd on two dual-stack nodes, as in
[conformance.md](conformance.md). `python -m e2e page` wrote this page from recorded results. [migrate.md](migrate.md)
describes how to replace the Go kube-proxy on your own cluster.

    make disrupt KUBERNETES=/path/to/kubernetes                          # ours, nftables mode
    make disrupt KUBERNETES=DIR PROXY=go MODE=iptables                   # the Go kube-proxy, to compare
    make disrupt KUBERNETES=DIR FOCUS=previous PREVIOUS=v0.1.0           # some rows, with an earlier revision of ours

- FOCUS is a regular expression over `baseline`, `go-nftables`, `go-iptables`, `two-steps`, `previous`, `kill`,
  `apiserver`, `kubelet`, `rollout`. A run with FOCUS writes into `/tmp/kpe2e-results` and does not change this page.
- PREVIOUS is by default the last tag or, without a tag, the revision 50 commits ago.
- The exit code is 1 if a request failed. At its end, even after an error or Ctrl-C, the command removes the cluster.

Each client sends ten requests a second, over IPv4 and IPv6. A client in a pod and a client on the pod's node use the
cluster IP, and a client outside the cluster uses the NodePort of the other node.

| kind | content of a request | failure of a request |
|---|---|---|
| new TCP | a connection and a request | the connection is refused, its SYN is lost, or no answer comes within 0.9 s |
| long TCP | a request on a connection that stays open | the connection ends, or no answer comes within 5 s |
| new UDP | a datagram from a new port | no answer comes within 0.9 s |
| long UDP | a datagram from a socket that stays open, as a resolver sends it | no answer comes within 0.9 s |

- Four Services share four pods: a Service without special fields, a Service with session affinity, a Service with
  weights and a Service with a Maglev table.
- A fifth Service has slow start and its own pods, which the rolling update replaces. In its last ten seconds such a pod
  is not ready, but still answers. The fifth Service gets no long TCP connections, because these connections would end
  with the pods.
- Our proxy counts connections on both nodes, resets connections to gone endpoints on one node, and uses fast forwarding
  on the other node if the kernel has flowtables. No other program on the nodes has NAT rules.

Each cell shows the number of failed requests and of all requests, and the longest time that any client was without an
answer. This time includes the 100 ms between two requests. The row `nothing happens` shows the noise of the machine. A
table contains only the rows that were run. `ours (COMMIT)` is our proxy at an earlier commit. Below a table is the
number of clients with failed requests.

- If a Go kube-proxy replaces a proxy of another mode, it removes the old rules before it writes its own rules. In
  between, new connections fail, and established connections lose their NAT. As many requests fail if both proxies are
  Go kube-proxies.
- A row with *then* has two steps ([migrate.md](migrate.md#back)): our proxy changes its mode, and once it is healthy,
  the Go kube-proxy in the new mode replaces it. In the opposite direction our proxy first replaces the Go kube-proxy,
  and then changes its mode.
- In the rolling update an earlier commit of our proxy lost one request of a long UDP flow in two of three runs, because
  it removed the flows of an endpoint 50 ms after the endpoint stopped serving. Now the proxy waits 200 ms for answers
  that are under way; in four runs it lost none of 19,025 such requests.
- The load of the machine matters. In an earlier run of our proxy in iptables mode, at a load of 26 to 60 on two cores,
  some requests failed in every row, even while nothing was disrupted. In the rolling update of that run two long UDP
  flows reached a removed endpoint for 10 and 20 s (27 requests), because the proxy's changes were late.
- Two answers of the Go kube-proxy's pods took longer than 0.9 s while a kubelet restarted, at a load of 16 to 26 on two
  cores.
"""


def render(records: Sequence[Record]) -> str:
    """Return the page: a table for each run, ours first."""
    lines = [_HEAD]
    for record in records:
        lines += [*_table(record), ""]
    if not records:
        lines.append("No run has been recorded.")
    return "\n".join(lines).rstrip() + "\n"


def _table(record: Record) -> Iterator[str]:
    kinds = list(record.rows[0].counts) if record.rows else []
    yield f"## {'Go kube-proxy' if record.proxy == 'go' else 'Ours'} in {record.mode} mode\n"
    known = (f"{name} {version}" for name, version in record.versions.items() if version)
    yield f"The run of {record.date} used {', '.join([f'commit {record.commit}', *known])}.\n"
    yield f"| {' | '.join(['disruption', 'seconds', *kinds])} |"
    yield f"|---|---:|{'---:|' * len(kinds)}"
    for row in record.rows:
        yield f"| {' | '.join([row.title, str(row.seconds), *map(cell, row.counts.values())])} |"
    clients = [f"{counted(len(row.failures), 'client')} in *{row.title}*" for row in record.rows if row.failures]
    if clients:
        yield f"\nRequests failed for {', '.join(clients)}."


def cell(count: Count) -> str:
    """Return a cell of the table; failures are bold."""
    failed = f"**{count.failed}**" if count.failed else "0"
    return f"{failed}/{count.asked}, {count.gap} ms"


def failed(rows: Sequence[Row]) -> Mapping[str, int]:
    """Return the number of failed requests, by the titles of the rows with failures."""
    sums = {row.title: sum(count.failed for count in row.counts.values()) for row in rows}
    return {title: count for title, count in sums.items() if count}
