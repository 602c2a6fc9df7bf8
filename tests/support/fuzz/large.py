"""Inputs of a megabyte that consist of repetitions: `python -m support.fuzz.large` prints the cost of each.

Fuzzing makes small inputs, and finds neither superlinear costs nor the memory per byte of input.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Final

from support.fuzz.judge import judge
from support.fuzz.targets import TARGETS

SIZE: Final = 1 << 20
_SERVICES: Final = b'\0{"kind":"ServiceList","metadata":{},"items":['
_SLICE: Final = (
    b'\1{"kind":"EndpointSliceList","metadata":{},"items":[{"metadata":{"name":"a"},"addressType":"IPv4","endpoints":['
)
_PORTS: Final = b'{"metadata":{"name":"a"},"spec":{"ports":['

CASES: Final[dict[tuple[str, str], tuple[bytes, bytes, bytes]]] = {
    ("lists", "items with a name"): (_SERVICES, b'{"metadata":{"name":"a"}},', b'{"metadata":{"name":"a"}}]}'),
    ("lists", "empty items"): (_SERVICES, b"{},", b"{}]}"),
    ("lists", "items that are numbers"): (_SERVICES, b"0,", b"0]}"),
    ("lists", "ports"): (_SERVICES + _PORTS, b'{"port":1},', b'{"port":1}]}}]}'),
    ("lists", "ports that are numbers"): (_SERVICES + _PORTS, b"0,", b"0]}}]}"),
    ("lists", "endpoints"): (_SLICE, b'{"addresses":["1.1.1.1"]},', b'{"addresses":["1.1.1.1"]}]}]}'),
    ("lists", "nesting"): (b"\0", b"[", b""),
    ("watches", "changes"): (b"\0\5", b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n', b""),
    ("watches", "changes of numbers"): (b"\0\5", b'{"type":"ADDED","object":0}\n', b""),
    ("watches", "empty lines"): (b"\0\5", b"\n", b""),
    ("answers", "headers"): (b"\0HTTP/1.1 200 OK\r\n", b"a:\r\n", b""),
    ("answers", "chunks of a byte"): (
        b"\x7fHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n\n\r\n", b""),
    ("requests", "requests at once"): (b"\x3f", b"GET / HTTP/1.1\r\n\r\n", b""),
    ("requests", "headers"): (b"\x3fGET / HTTP/1.1\r\n", b"a:\r\n", b""),
    ("statuses", "causes"): (b'{"details":{"causes":[', b"{},", b"{}]}}"),
    ("certificates", "beginnings"): (b"", b"-----BEGIN CERTIFICATE-----", b""),
    ("cluster", "weights"): (
        b'S{"metadata":{"name":"a","annotations":{"kube-proxy-py/weights":"', b"a=1,",
        b'"}},"spec":{"clusterIP":"10.0.0.1","ports":[{"port":1}]}}'),
    ("manifests", "a list in YAML"): (b"\0a:\n", b"- 1\n", b""),
    ("manifests", "documents"): (b"\0", b"---\na\n", b""),
    ("manifests", "empty items in JSON"): (b'\1{"kind":"List","items":[', b"{},", b"{}]}"),
    ("configuration", "a list"): (b"[", b"a,", b"a]"),
    ("iptables_save", "rules"): (b"*nat\n", b"-A a\n", b"COMMIT\n"),
}  # fmt: skip
"""The beginning, the repeated part and the end, by target and by the repeated item."""


def made(case: tuple[str, str], size: int = SIZE) -> bytes:
    """Return the input of a case."""
    first, again, last = CASES[case]
    return first + again * ((size - len(first) - len(last)) // len(again)) + last


def main() -> None:
    """Print a table."""
    print("| target | a megabyte of | CPU | memory, times that |\n|---|---|---:|---:|")
    for case in CASES:
        read, data = TARGETS[case[0]].read, made(case)
        start = time.process_time()
        judge(read, data)
        seconds = time.process_time() - start
        tracemalloc.start()
        judge(read, data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"| `{case[0]}` | {case[1]} | {seconds:.2f} s | {peak / len(data):.0f} |", flush=True)


if __name__ == "__main__":
    main()
