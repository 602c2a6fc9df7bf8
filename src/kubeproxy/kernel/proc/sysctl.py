"""Reads and writes kernel parameters under /proc/sys. Source: Documentation/networking/nf_conntrack-sysctl.rst."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kubeproxy.errors import ApplyError, Unsupported

_log = logging.getLogger("kubeproxy.kernel")

ROOT: Final = Path("/proc/sys")

NF_CONNTRACK_MAX: Final = "net/netfilter/nf_conntrack_max"
TCP_TIMEOUT_ESTABLISHED: Final = "net/netfilter/nf_conntrack_tcp_timeout_established"
TCP_TIMEOUT_CLOSE_WAIT: Final = "net/netfilter/nf_conntrack_tcp_timeout_close_wait"
TCP_BE_LIBERAL: Final = "net/netfilter/nf_conntrack_tcp_be_liberal"
UDP_TIMEOUT: Final = "net/netfilter/nf_conntrack_udp_timeout"
UDP_TIMEOUT_STREAM: Final = "net/netfilter/nf_conntrack_udp_timeout_stream"

_HASHSIZE: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")

# The characters that a key may contain, as in interface names. A part that is only dots would lead out of /proc/sys.
_KEY: Final = re.compile(r"(?:(?!\.+(?:/|$))[A-Za-z0-9_.:@+-]+/)+(?!\.+$)[A-Za-z0-9_.:@+-]+")

_REMEDY: Final = {
    errno.EACCES: "run it as root with /proc/sys mounted writable (a privileged container), or set it on the host",
    errno.EPERM: "run it as root with /proc/sys mounted writable (a privileged container), or set it on the host",
    errno.EROFS: "mount /proc/sys writable (a privileged container), or set it on the host",
    errno.EINVAL: "the kernel does not accept this value",
}


def read_sysctl(key: str, root: Path = ROOT) -> str:
    """Return a kernel parameter's text. A key is a path below /proc/sys, such as net/ipv4/ip_forward. Raises
    Unsupported if the kernel has no parameter of that name, and ApplyError if the parameter cannot be read."""
    try:
        return _path(key, root).read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise Unsupported(_missing(key)) from error
    except OSError as error:
        raise ApplyError(f"cannot read sysctl {key}: {error.strerror}") from error


def write_sysctl(key: str, value: int, root: Path = ROOT) -> bool:
    """Set a kernel parameter to a number; return whether the value was different. A parameter that already has this
    value is not written, so it may be read-only. Raises Unsupported if the kernel has no such parameter, and ApplyError
    if the parameter cannot be read or written."""
    if read_sysctl(key, root) == str(value):
        return False
    _write(_path(key, root), str(value), f"sysctl {key}")
    return True


def apply_settings(settings: Sequence[tuple[str, int]], root: Path = ROOT, hashsize: Path = _HASHSIZE) -> list[str]:
    """Write the settings that differ; return the written keys. Raises the errors of `write_sysctl`.

    Unlike the Go kube-proxy of 1.36, this function only increases nf_conntrack_max. An operator's larger value remains.
    If the parameter is read-only in this network namespace, but large enough, this is no error. The hash table is
    enlarged to a quarter of nf_conntrack_max, as in the Go kube-proxy. A failure to enlarge the hash table, for example
    in a container, is no error, because a smaller table is only slower."""
    written = []
    for key, value in settings:
        enough = key == NF_CONNTRACK_MAX and int(read_sysctl(key, root)) > value
        if not enough and write_sysctl(key, value, root):
            written.append(key)
        if key == NF_CONNTRACK_MAX:
            _raise_hashsize(value // 4, hashsize)
    return written


def _raise_hashsize(wanted: int, path: Path) -> None:
    try:
        size = int(path.read_text(encoding="ascii"))
        if size < wanted:
            _write(path, str(wanted), f"the connection tracking hash size ({path})")
    except (ApplyError, OSError, ValueError) as error:
        _log.warning("The connection tracking table may be slow when it is full: %s", error)


def _write(path: Path, value: str, what: str) -> None:
    try:
        # write_text would truncate the file, and some kernels refuse to truncate a parameter. The kernel takes each
        # write() as a whole value, so the value is written by one call.
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(file, value.encode())
        finally:
            os.close(file)
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0, "")
        detail = f"cannot set {what} to {value}: {error.strerror}"
        raise ApplyError(f"{detail}; {remedy}" if remedy else detail) from error


def _path(key: str, root: Path) -> Path:
    if not _KEY.fullmatch(key):
        raise ApplyError(
            f"{key!r} is not the name of a sysctl: it must be a path below /proc/sys, such as net/ipv4/ip_forward"
        )
    return root / key


def _missing(key: str) -> str:
    if "nf_conntrack" in key:
        return f"the kernel has no sysctl {key}: load the module nf_conntrack (modprobe nf_conntrack)"
    return f"the kernel has no sysctl {key}: this kernel, or this network namespace, does not support it"
