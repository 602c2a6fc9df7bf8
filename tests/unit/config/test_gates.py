"""Feature gates: known, locked and unknown ones."""

import pytest

from kubeproxy.config.gates import KNOWN_GATES, PROXY_GATES, alpha_logging, gate_problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NFTablesProxyMode", True),
        ("GitRepoVolumeDriver", False),
        ("WatchListClient", True),
        ("WatchListClient", False),
        ("AllAlpha", True),
        ("KubeProxyIPVS", True),
        ("KubeProxyIPVS", False),
        ("NodeSwap", True),
    ],
)
def test_known_gates(name, value):
    assert gate_problem(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("NFTablesProxyMode", False, "cannot be set to false: the feature is locked to true in Kubernetes 1.36"),
        ("GitRepoVolumeDriver", True, "cannot be set to true: the feature is locked to false in Kubernetes 1.36"),
        ("NFTablesProxyMod", True, "unknown feature gate; did you mean NFTablesProxyMode?"),
        ("nftablesproxymode", True, "unknown feature gate; did you mean NFTablesProxyMode?"),
        ("SupportIPVSProxyMode", True, "unknown feature gate"),
    ],
)
def test_refused_gates(name, value, problem):
    assert gate_problem(name, value) == problem


def test_the_gates_that_help_shows_are_known():
    assert {name for name, _ in PROXY_GATES} <= KNOWN_GATES


def test_alpha_logging():
    assert alpha_logging({"LoggingAlphaOptions": True})
    assert alpha_logging({"AllAlpha": True})
    assert not alpha_logging({"AllAlpha": True, "LoggingAlphaOptions": False})
    assert not alpha_logging({})
