"""Another program that repeatedly loads many elements into a separate table: `python -m bench.stranger COUNT`.

It competes with the proxy for the kernel's mutex of nf_tables.
"""

from __future__ import annotations

import sys

from bench.companion import say
from bench.objects import dotted
from bench.worker import die_with_parent
from support import nft


def main(count: str) -> None:
    """Load elements until the parent has ended."""
    die_with_parent()
    table = "add table ip elsewhere\nadd set ip elsewhere hosts { type ipv4_addr; }\n"
    hosts = ", ".join(dotted(0x0B000000 + number) for number in range(int(count)))
    say()
    while True:
        nft.run(f"{table}flush set ip elsewhere hosts\nadd element ip elsewhere hosts {{ {hosts} }}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
