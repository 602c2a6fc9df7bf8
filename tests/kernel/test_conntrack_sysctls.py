"""Kernel parameters in a separate network namespace, where nf_conntrack_max is read-only."""

from __future__ import annotations

import logging

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.sysctl import (
    NF_CONNTRACK_MAX,
    TCP_TIMEOUT_ESTABLISHED,
    UDP_TIMEOUT,
    apply_settings,
    read_sysctl,
)
from support.namespaces import inside, namespace


def test_timeouts_are_the_namespaces_own_and_the_limit_is_only_refused_when_it_is_too_small(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = read_sysctl(UDP_TIMEOUT)
    with namespace() as name, caplog.at_level(logging.WARNING, "kubeproxy.kernel"):
        settings = [(NF_CONNTRACK_MAX, 1), (TCP_TIMEOUT_ESTABLISHED, 777), (UDP_TIMEOUT, 42)]
        assert inside(name, lambda: apply_settings(settings)) == [TCP_TIMEOUT_ESTABLISHED, UDP_TIMEOUT]
        assert inside(name, lambda: apply_settings(settings)) == []
        assert inside(name, lambda: read_sysctl(UDP_TIMEOUT)) == "42"
        with pytest.raises(
            ApplyError, match=r"cannot set sysctl net/netfilter/nf_conntrack_max to 99999999: .*; run it as"
        ):
            inside(name, lambda: apply_settings([(NF_CONNTRACK_MAX, 99999999)]))
    assert caplog.text == ""
    assert read_sysctl(UDP_TIMEOUT) == before
