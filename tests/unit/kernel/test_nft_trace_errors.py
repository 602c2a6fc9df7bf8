"""Errors on kernels that cannot trace, and of processes without the permission."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import trace
from kubeproxy.kernel.nftables.trace import OUTPUT, Mark, MarkedFlow

FLOW = MarkedFlow(b"", b"\x0a\0\0\1", 6, 80, (OUTPUT,))


class Refusing:
    """A kernel that refuses each transaction."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.closed = False

    def commit(self, parts: object) -> None:
        raise NetlinkError(self.code, "the kernel refused an nf_tables transaction")

    def close(self) -> None:
        self.closed = True


def refused(monkeypatch, code: int) -> Refusing:
    kernel = Refusing(code)
    monkeypatch.setattr(trace.Transactions, "open", lambda: kernel)
    return kernel


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT])
def test_a_kernel_that_lacks_a_feature_names_the_requirement(monkeypatch, code):
    kernel = refused(monkeypatch, code)
    with pytest.raises(Unsupported, match=r"this kernel cannot trace packets .* needs Linux 5\.12"):
        Mark.open(FLOW)
    assert kernel.closed


def test_a_missing_right_is_not_reported_as_an_old_kernel(monkeypatch):
    kernel = refused(monkeypatch, errno.EPERM)
    with pytest.raises(NetlinkError, match="not permitted"):
        Mark.open(FLOW)
    assert kernel.closed
