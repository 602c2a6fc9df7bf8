"""The nft command: loads ruleset text, lists tables. For what is static and rare; elements go by kernel/nfnetlink.

Argument lists only, no shell; the text goes through standard input.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import subprocess
from contextlib import closing
from threading import Event
from typing import Final

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.proc.modules import kernel_version

log = logging.getLogger("kubeproxy.nft")

_TIMEOUT = 120.0
_VERSION_TIMEOUT = 10.0
_NO_NF_TABLES = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT})
"""What a kernel without nf_tables says, or without nfnetlink at all."""
OLDEST = (1, 0, 1)  # of nft, as for the Go kube-proxy


_CRASHED: Final = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})

_crashes: Final = Event()
"""Set once nft has crashed over what else is on this node: from then on it is kept from looking at it."""


class _CrashedError(ApplyError):
    """nft ended by a signal."""


def run(text: str) -> None:
    """Load ruleset text in one transaction. Raises ApplyError with nft's first complaint."""
    if not _crashes.is_set():
        try:
            _nft(["-f", "-"], text)
        except _CrashedError:
            log.warning(
                "nft crashes here, so from now on it looks at our own table only: sets that a newer nft made"
                " (1.0.6.1, 1.1.2 or later), as for a firewall, crash older ones; upgrade the package nftables"
            )
            _crashes.set()
        else:
            return
    if removal := _REMOVAL.fullmatch(text):
        _remove(_FAMILIES[removal[1]], removal[2])
    else:
        _nft(["-f", "-"], text + _blinkers(text))


_FAMILIES: Final = {"ip": socket.AF_INET, "ip6": socket.AF_INET6}
_REMOVAL: Final = re.compile(r"delete table (ip6?) (\S+)\n")
_MADE: Final = re.compile(r"^add (chain|set|map) (\S+ \S+) (\S+)", re.MULTILINE)
_FILLED: Final = re.compile(r"^(?:flush set|add element) (\S+ \S+) (\S+)", re.MULTILINE)


def _blinkers(text: str) -> str:
    """Return the line after a text that keeps nft from reading the sets of other tables, which may crash it.

    Before it looks at any rule, nft reads the sets of all tables, unless the last command lists something: then those
    of its table only, or one set if that is what is listed (evaluate_cache_list of nft). Where a table is replaced, the
    sets of the old one matter no more, and it may be of another program with a newer nft.
    """
    made = [found.groups() for found in _MADE.finditer(text)]
    chains = [(table, name) for kind, table, name in made if kind == "chain"]
    if chains:
        table, name = chains[-1]
        sets = [found for found in made if found[0] != "chain" and found[1] == table]
        if sets and f"\ndelete table {table}\n" in text:
            return f"list {' '.join(sets[-1])}\n"
        return f"list chain {table} {name}\n"
    filled = _FILLED.search(text)
    return f"list set {filled[1]} {filled[2]}\n" if filled else ""


def version() -> tuple[int, ...]:
    """Return the version of nft. Raises Unsupported when it is missing."""
    try:
        command = ["nft", "--version"]
        out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT).stdout
    except FileNotFoundError as error:
        raise Unsupported("nft is missing: install the package nftables (apt-get install nftables)") from error
    except PermissionError as error:  # it has a capability of its own, as in our image, that this process may not have
        raise Unsupported("nft cannot be started: give the process the capability CAP_NET_ADMIN") from error
    except OSError as error:
        raise Unsupported(f"nft cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unsupported(
            f"nft --version did not answer within {_VERSION_TIMEOUT:.0f} s: look what it waits for"
        ) from error
    found = re.search(r"v(\d+(?:\.\d+)+)", out)
    return tuple(int(part) for part in found[1].split(".")) if found else (0,)


def require(mode: str, kernel: tuple[int, int], otherwise: str) -> None:
    """Raise Unsupported when a mode that needs nft cannot use nf_tables here, see `require_kernel`."""
    require_kernel(mode, kernel, otherwise)
    found = version()
    if found < OLDEST:
        shown = ".".join(map(str, found))
        raise Unsupported(f"{mode} mode needs nft 1.0.1 or later, this is {shown}: upgrade the package nftables")


def require_kernel(mode: str, kernel: tuple[int, int], otherwise: str) -> None:
    """Raise Unsupported when nf_tables cannot be used here. `otherwise` says what to do about an old kernel."""
    release = os.uname().release
    if (0, 0) < kernel_version(release) < kernel:
        oldest = ".".join(map(str, kernel))
        raise Unsupported(f"{mode} mode needs Linux {oldest} or later, this is {release}: {otherwise}")
    try:
        nfnetlink.table(socket.AF_INET, "kube-proxy")
    except NetlinkError as error:
        raise Unsupported(
            f"nf_tables does not answer ({error}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


_RULE = re.compile(r"^\s*(.+?) # handle (\d+)$", re.MULTILINE)


def rule_texts(family: str, table: str, chain: str) -> dict[int, str]:
    """Return the rules of a chain as nft writes them, by handle; elements of sets are not read. Raises ApplyError."""
    listing = _nft(["--terse", "--handle", "list", "chain", family, table, chain])
    return {int(handle): text for text, handle in _RULE.findall(listing) if not text.endswith("{")}


def _nft(arguments: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except FileNotFoundError as error:
        # It was there at the start: a package upgrade takes it away for a moment.
        raise ApplyError("nft is missing: install the package nftables (apt-get install nftables)") from error
    except OSError as error:
        raise ApplyError(f"nft cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ApplyError(f"nft {' '.join(arguments)} did not finish in {_TIMEOUT:.0f} s") from error
    if done.returncode in _CRASHED:
        raise _CrashedError(
            f"nft {' '.join(arguments)} crashed ({signal.Signals(-done.returncode).name}): "
            "upgrade the package nftables; sets that a newer nft made (1.0.6.1, 1.1.2 or later) crash older ones"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ApplyError(f"nft {' '.join(arguments)}: {' / '.join(line.strip() for line in lines[:4])}")
    return done.stdout


def remove_table(name: str) -> list[str]:
    """Remove the table of this name from both families, where it is there; return what could not be removed.

    Needs no nft: a node that is cleaned up may have lost it.
    """
    failures = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            if nfnetlink.table(family, name) is None:
                continue
        except ApplyError as error:
            if not isinstance(error, NetlinkError) or error.code not in _NO_NF_TABLES:
                failures.append(f"cannot look for the table {name}: {error}")
            continue
        try:
            _remove(family, name)
        except ApplyError as error:
            if not isinstance(error, NetlinkError) or error.code != errno.ENOENT:  # another program was faster
                failures.append(f"cannot remove the table {name}: {error}")
    return failures


def _remove(family: int, name: str) -> None:
    with closing(nfnetlink.Transactions.open()) as transactions:
        transactions.commit([nfnetlink.table_removal(family, name)])
