"""Runs the iptables commands: lists rules, and changes them with iptables-restore.

A node may have rules of both variants, nft and legacy, in both families; each installed variant is called by its own
name. The variant that the node uses is detected as in the Go kube-proxy's images: the variant in which the kubelet
created a hint chain in the table mangle, else the variant with more rules, or nft if there are no rules. Source:
kubernetes-sigs/iptables-wrappers, KEP-3178. Commands are argument lists without a shell, and rules go through standard
input. Rules count packets in named counters of the kernel (nfnetlink_acct.c of Linux 6.18)."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final, Literal, NamedTuple

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables.nfnetlink import has_chain
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, LockHeldError, Waited, lock
from kubeproxy.model.addresses import Family

_TIMEOUT: Final = 60.0
_RESTORE_TIMEOUT: Final = 600.0  # iptables-legacy needs seconds for 100,000 rules, and ten times as long on a slow node
LOCK_TIMEOUT: Final = 5  # like -w 5 of the Go kube-proxy
_LOCK_NAMED: Final = (1, 8, 6)  # the first version with a configurable lock file
NAMES: Final = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
VARIANTS: Final = ("iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy")
_PIPE: Final = 1 << 20
_INCOMPATIBLE: Final = "is incompatible, use 'nft' tool"
_LOCK_HELD: Final = "holding the xtables lock"
# Comments of other programs may contain any bytes. A command that removes the rule must contain the same bytes.
_ODD_BYTES: Final = "surrogateescape"


class CommandError(ApplyError):
    """A command ended with an exit status other than 0; `stderr` is its standard error."""

    def __init__(self, command: str, stderr: str, status: int) -> None:
        self.stderr = stderr
        self.status = status
        lines = stderr.strip().splitlines() or [f"exit status {status}"]
        # The last line is the error; the lines before it are warnings.
        super().__init__(f"{command}: {' / '.join(line.strip() for line in lines[-3:])}")


class RestoreError(CommandError):
    """iptables-restore failed."""


class Incompatible(ApplyError):  # noqa: N818 - the name in the command's message
    """A chain has native nft rules; iptables-nft does not print the table, but can change the table's other chains."""


class SavedTable(NamedTuple):
    """A table as iptables-save prints it: its chains, and its rules as lines '-A CHAIN ...'."""

    name: str
    chains: tuple[str, ...]
    rules: tuple[str, ...]


class Commands(NamedTuple):
    """The commands of one variant for one family. `name` is, for example, iptables-nft, ip6tables-legacy or iptables.
    `uses_nft` is True for the variant nft, also if `name` does not contain the variant. `version` is, for example, (1,
    8, 9)."""

    name: str
    family: Family
    uses_nft: bool
    version: tuple[int, ...]

    def restore(self, pieces: Iterable[str]) -> Waited:
        """Apply input of `iptables-restore --noflush`: change each table atomically, and keep chains that the input
        does not name. `pieces` are the parts of the input, which the command parses while they are produced; if
        producing a part fails, nothing is changed. Returns the time for which another program held the lock of the
        legacy variant. Raises RestoreError or ApplyError."""
        command = [f"{self.name}-restore", "--noflush", "-w", str(LOCK_TIMEOUT)]
        if self.uses_nft:
            _stream(command, pieces)
            return NOT_WAITED
        with lock().held(LOCK_TIMEOUT) as waited:
            if self.obeys_lock:
                _stream(command, pieces, **lock().start())
                return waited
        _stream(command, pieces)
        return waited

    @property
    def obeys_lock(self) -> bool:
        """Whether the commands can run while this process holds the lock of legacy iptables."""
        return self.version >= _LOCK_NAMED

    def table(self, name: str) -> SavedTable | None:
        """Return a table; None if it is empty. Raises ApplyError."""
        tables = _parse(_printed([f"{self.name}-save", "-t", name]))
        return next((table for table in tables if table.name == name), None)

    def saved(self, table: str) -> Iterator[str]:
        """Yield the lines that iptables-save prints for a table, as they arrive. Raises Incompatible or ApplyError."""
        for line in _printed([f"{self.name}-save", "-t", table]):
            if line.startswith("# Table ") and _INCOMPATIBLE in line:
                raise Incompatible(f"{self.name}-save: {line.strip()}")
            yield line

    def rules(self, table: str, chain: str) -> tuple[str, ...] | None:
        """Return a chain's rules as iptables-save prints them; None if the chain is missing. Raises ApplyError."""
        try:
            lines = list(_printed([self.name, "-w", str(LOCK_TIMEOUT), "-t", table, "-S", chain]))
        except CommandError as error:
            if error.status != 1:
                raise
            # iptables-nft 1.8.9 prints this error also for a missing chain.
            if _INCOMPATIBLE in error.stderr and has_chain(self.family, table, chain):
                raise Incompatible(error.stderr.strip()) from error
            return None
        return tuple(line.removesuffix("\n") for line in lines if line.startswith("-A "))


def installed() -> list[str]:
    """Return the installed commands that have a variant in their names; if there are none, the installed commands among
    'iptables' and 'ip6tables'."""
    found = [variant for variant in VARIANTS if shutil.which(f"{variant}-save")]
    return found or [name for name in NAMES.values() if shutil.which(f"{name}-save")]


def installed_for(family: Family) -> list[str]:
    """Return the names of a family's installed commands."""
    return [variant for variant in installed() if variant.partition("-")[0] == NAMES[family]]


def commands(name: str) -> Commands:
    """Return the Commands of this name, with variant and version. Raises ApplyError if the command cannot be run."""
    stderr = "".join(_printed([name, "--version"]))
    found = re.search(r"v(\d+(?:\.\d+)+)", stderr)
    version = tuple(int(part) for part in found[1].split(".")) if found else (0,)
    family = Family.IPV6 if name.startswith("ip6") else Family.IPV4
    return Commands(name, family, "nf_tables" in stderr, version)


def tables(variant: str) -> Iterator[SavedTable]:
    """Yield the tables of a variant that are not empty. Raises ApplyError."""
    return _parse(_printed([f"{variant}-save"]))


def _parse(lines: Iterable[str]) -> Iterator[SavedTable]:
    name = ""
    chains: list[str] = []
    rules: list[str] = []
    for line in (each.removesuffix("\n") for each in lines):
        if line.startswith("*"):
            name, chains, rules = line[1:], [], []
        elif line.startswith(":"):
            chains.append(line[1:].split(" ", 1)[0])
        elif line.startswith("-A "):
            rules.append(line)
        elif line == "COMMIT":
            yield SavedTable(name, tuple(chains), tuple(rules))


def _printed(command: list[str]) -> Iterator[str]:
    """Yield the lines that a command prints. Raises LockHeldError, CommandError, or ApplyError if it cannot be run."""
    with _running(command, _TIMEOUT, stdout=subprocess.PIPE) as (process, stderr):
        assert process.stdout is not None  # noqa: S101 - tells the type checker that the pipe exists
        with io.TextIOWrapper(process.stdout, encoding="utf-8", errors=_ODD_BYTES) as printed:
            yield from printed
        if status := process.wait():
            text = os.pread(stderr, 1 << 12, 0).decode(errors="replace")
            if _LOCK_HELD in text:
                raise LockHeldError(f"{command[0]}: {text.strip()}")
            raise CommandError(command[0], text, status)


def _stream(command: list[str], pieces: Iterable[str], **start: Any) -> None:
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "bufsize": 0}
    with _running(command, _RESTORE_TIMEOUT, **ends, **start) as (process, stderr):
        _feed(process, pieces)
        if status := process.wait():
            text = os.pread(stderr, 1 << 16, 0).decode(errors="replace")
            if status == -9:
                text = f"did not finish in {_RESTORE_TIMEOUT:.0f} s"
            raise RestoreError(command[0], text, status)


@contextmanager
def _running(command: list[str], seconds: float, **how: Any) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command while the `with` body runs, for at most `seconds`; yield the process and its standard error file.
    Raises ApplyError if the command cannot be started, also for lack of a descriptor, process or thread."""
    with ExitStack() as stack:
        try:
            stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
            stack.callback(os.close, stderr)
            process = stack.enter_context(subprocess.Popen(command, stderr=stderr, **how))
            stack.callback(process.kill)
            # Popen.wait polls if it has a timeout, which would add up to 50 ms to each sync.
            clock = threading.Timer(seconds, process.kill)
            clock.start()
        except OSError as error:
            raise ApplyError(f"{command[0]}: {error.strerror}") from error
        except RuntimeError as error:  # Python cannot start a thread
            raise ApplyError(f"{command[0]}: {error}") from error
        stack.callback(clock.cancel)
        yield process, stderr


def _feed(process: subprocess.Popen[bytes], pieces: Iterable[str]) -> None:
    """Write the pieces into the pipe and close it. A process that ends early reports the error itself."""
    pipe = process.stdin
    assert pipe is not None  # noqa: S101 - tells the type checker that the pipe exists
    number = pipe.fileno()
    try:
        for piece in pieces:
            data = piece.encode(errors=_ODD_BYTES)
            if len(data) > _PIPE // 16:
                fcntl.fcntl(number, fcntl.F_SETPIPE_SZ, _PIPE)
            view = memoryview(data)
            while view:
                view = view[os.write(number, view) :]
    except BrokenPipeError:
        pass
    finally:
        pipe.close()


def removal(table: str, chains: Sequence[str], rules: Iterable[str], *, delete: bool = True) -> str:
    """Return input for iptables-restore that removes rules ("-A ...") and empties or deletes chains; '' for none."""
    lines = [f":{chain} - [0:0]" for chain in chains]
    lines += [f"-D {rule.removeprefix('-A ')}" for rule in rules]
    lines += [f"-X {chain}" for chain in chains] if delete else []
    return "\n".join([f"*{table}", *lines, "COMMIT", ""]) if lines else ""


def chain_of(rule: str) -> str:
    """Return the chain of a rule."""
    return rule.split(" ", 2)[1]


def target_of(rule: str) -> str:
    """Return the target of a rule; '' if it has none."""
    words = rule.split(" ")
    before = words[-2::-1]  # The search is backwards, because a log prefix may be "-j"; the last word is no flag.
    for flag in ("-j", "-g"):
        if flag in before:
            return words[len(words) - 1 - before.index(flag)]
    return ""


HINTS: Final = frozenset({"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})

_TRIED_AGAIN: Final = (0.1, 0.4)
"""Seconds between attempts to start a command that could not be started, for example for lack of memory."""

Variant = Literal["nft", "legacy", ""]


@cache
def chosen() -> Variant:
    """Return the variant to use; '' if no command has a variant in its name. Cached for the life of the process."""
    return detect()


def detect() -> Variant:
    """Return the variant that this node uses now."""
    counts: dict[Variant, int] = {}
    for variant in ("nft", "legacy"):
        names = [name for name in installed() if name.endswith(f"-{variant}")]
        if not names:
            continue
        rules, hinted = _survey(names)
        if hinted:
            return variant
        counts[variant] = rules
    if not counts:
        return ""
    return "legacy" if counts.get("legacy", -1) > counts.get("nft", -1) else "nft"


def variant_commands(family: Family, variant: Variant) -> Commands:
    """Return a variant's commands. Raises ApplyError when they are missing."""
    name = NAMES[family]
    return commands(f"{name}-{variant}" if variant else name)


def in_use(family: Family, table: str, chain: str) -> Commands:
    """Return the commands of the variant in which the table has this chain, else of the variant that the node uses.
    Lists only this table, and writes nothing. Raises ApplyError."""
    there = [found for found in map(commands, installed_for(family)) if _has(found, table, chain)]
    return there[0] if len(there) == 1 else variant_commands(family, chosen())


def _has(found: Commands, table: str, chain: str) -> bool:
    try:
        listed = found.table(table)
    except ApplyError:
        return False
    return listed is not None and chain in listed.chains


def _survey(names: list[str]) -> tuple[int, bool]:
    """Return the total number of rules, and whether the kubelet's hint chain exists."""
    rules, hinted = 0, False
    for name in names:
        tables = _tables(name)
        rules += sum(len(table.rules) for table in tables)
        hinted = hinted or any(table.name == "mangle" and HINTS.intersection(table.chains) for table in tables)
    return rules, hinted


def _tables(name: str) -> list[SavedTable]:
    """Return the tables of a variant; none if the variant does not work on this node, for example without kernel
    modules. A command that could not be started is tried again, because the caller caches the result."""
    for pause in (*_TRIED_AGAIN, None):
        try:
            return list(tables(name))
        except ApplyError as error:
            if pause is None or not isinstance(error.__cause__, OSError):
                break
            time.sleep(pause)
    return []


_NEW: Final = 7 << 8 | 0  # NFNL_SUBSYS_ACCT, NFNL_MSG_ACCT_NEW
_GET: Final = 7 << 8 | 1
_NAME: Final = 1
_PACKETS: Final = 2
_UNKNOWN: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)  # the kernel lacks nfnetlink_acct
_HEADER: Final = nl.netfilter_header()


def ensure_counter(name: str) -> bool:
    """Create a packet counter unless it exists; return False if the kernel does not support packet counters. Raises
    ApplyError if the kernel refuses for another reason, such as lack of memory; a later attempt may succeed."""
    accepted = (*_UNKNOWN, errno.EBUSY, errno.EEXIST)
    with nl.Netlink.open(nl.NETLINK_NETFILTER) as link:
        request = _HEADER + nl.text_attribute(_NAME, name)
        return link.request(_NEW, request, f"create the packet counter {name}", accepted=accepted) not in _UNKNOWN


@nl.understood("packet counters")
def counted_packets(name: str, link: nl.Netlink) -> int:
    """Return the number of packets in a counter. Raises NetlinkError, with code ENOENT if the counter is missing."""
    places = link.ask(_GET, _HEADER + nl.text_attribute(_NAME, name), f"the packet counter {name}")
    return next((int.from_bytes(nl.parts(*place)[_PACKETS], "big") for place in places), 0)
