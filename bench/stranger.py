"""Another program that loads many elements into a table of its own, again and again: `python -m bench.stranger COUNT`.

It shares the kernel's lock of nf_tables with the proxy.
"""

from __future__ import annotations

import sys

from bench.companion import say
from bench.objects import dotted
from bench.worker import die_with_parent
from support import nft


def main(count: str) -> None:
    """Load until the parent is gone."""
    die_with_parent()
    table = "add table ip elsewhere\nadd set ip elsewhere hosts { type ipv4_addr; }\n"
    hosts = ", ".join(dotted(0x0B000000 + number) for number in range(int(count)))
    say()
    while True:
        nft.run(f"{table}flush set ip elsewhere hosts\nadd element ip elsewhere hosts {{ {hosts} }}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
