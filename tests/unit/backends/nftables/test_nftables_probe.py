"""On a node that cannot run nftables mode, the check reports the missing requirement and the remedy."""

from __future__ import annotations

import errno
import os

import pytest

from kubeproxy.backends.nftables import mode as mode_module
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import messages
from kubeproxy.setup import modes


@pytest.fixture
def node(monkeypatch):
    """A node with all requirements; return a function that removes one."""

    def has(release="6.1.0-13-amd64", answers=True):
        def table(_):
            if not answers:
                raise NetlinkError(errno.EPERM, "table")

        uname = os.uname()
        monkeypatch.setattr(os, "uname", lambda: os.uname_result((*uname[:2], release, *uname[3:])))
        monkeypatch.setattr(messages.TableReader, "header", table)

    return has


@pytest.mark.parametrize("release", ["5.13.0", "5.15.0-91-generic", "6.18.0+", "7.0-rc1"])
def test_new_enough(node, release):
    node(release)
    mode_module.check(KubeProxyConfiguration(), ())


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        (
            {"release": "5.12.19"},
            "or later, and this is 5.12.19: use iptables mode, or upgrade; if nf_tables is backported, set KUBE_.*=1",
        ),
        ({"release": "4.19.0-amd64"}, "nftables mode needs Linux 5.13 or later"),
        ({"answers": False}, "nf_tables does not answer .*modprobe nf_tables.*capability CAP_NET_ADMIN"),
    ],
)
def test_missing_objects_and_requirements(node, lacks, message, monkeypatch):
    monkeypatch.setenv(mode_module.SKIP_KERNEL, "")  # as in the Go kube-proxy: only with a value
    node(**lacks)
    with pytest.raises(Unsupported, match=message):
        mode_module.check(KubeProxyConfiguration(), ())


def test_an_old_kernel_is_tried_if_the_operator_allows_it(node, monkeypatch):
    """Like kernel 4.18 of Red Hat, which has a later nf_tables (kubernetes issue 122743)."""
    monkeypatch.setenv(mode_module.SKIP_KERNEL, "true")
    node("4.18.0-553.el8.x86_64")
    mode_module.check(KubeProxyConfiguration(), ())


@pytest.mark.parametrize(("mode", "tables"), [("nftables", 2), ("userspace", 1)])
@pytest.mark.parametrize(("code", "families"), [(errno.EPERM, 2), (errno.EINVAL, 0)])
def test_a_clean_up_without_the_permission_to_look_fails(monkeypatch, mode, tables, code, families):
    def table(_):
        raise NetlinkError(code, "cannot read nf_tables tables")

    monkeypatch.setattr(messages.TableReader, "header", table)
    assert len(modes.named(mode).cleanup()) == tables * families
