"""Warnings about a valid configuration."""

import pytest

from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.validate import notices


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"mode": "nftables"}, []),
        ({"mode": "iptables"}, []),
        ({}, ["mode is not set, which means nftables here and iptables in the Go kube-proxy before 1.40"]),
        ({"mode": "ipvs", "feature_gates": {"KubeProxyIPVS": True}}, ["Setting deprecated feature gate KubeProxyIPVS"]),
    ],
)
def test_notices(config, told):
    found = list(notices(KubeProxyConfiguration(**config)))
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))
