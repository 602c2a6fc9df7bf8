"""The removal of a table when the kernel gives unexpected answers."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.kernel.netlink.protocol import DumpInterruptedError, NetlinkError
from kubeproxy.kernel.nftables import messages


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT])
def test_a_kernel_without_nf_tables_has_nothing_to_remove(code, monkeypatch):
    def table(*_):
        raise NetlinkError(code, "nf_tables tables")

    monkeypatch.setattr(messages.TableReader, "header", table)
    assert messages.remove_table("kube-proxy") == []


@pytest.mark.parametrize(
    "error",
    [NetlinkError(errno.ENOBUFS, "tables"), NetlinkError(errno.EPERM, "tables"), DumpInterruptedError("tables")],
)
def test_a_kernel_that_does_not_say_is_asked_again_later(error, monkeypatch):
    """Remaining rules of another mode would send connections to wrong endpoints."""

    def table(*_):
        raise error

    monkeypatch.setattr(messages.TableReader, "header", table)
    failures = messages.remove_table("kube-proxy")
    assert len(failures) == 2
    assert all("kube-proxy" in failure for failure in failures)
