"""Feature gates: known, locked and unknown ones."""

import pytest

from kubeproxy.config.gates import (
    GATES,
    PROXY_GATES,
    Stage,
    alpha_logging,
    gate_enabled,
    gate_problem,
    gate_states,
    gate_warnings,
)


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
        ("ClientsAllowCBOR", True),
        ("ContextualLogging", False),
        ("InOrderInformers", True),
        ("AtomicFIFO", False),
        ("DRAPrioritizedList", False),
    ],
)
def test_known_gates(name, value):
    assert gate_problem(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("NFTablesProxyMode", False, "cannot set feature gate NFTablesProxyMode to false, feature is locked to true"),
        (
            "GitRepoVolumeDriver",
            True,
            "cannot set feature gate GitRepoVolumeDriver to true, feature is locked to false",
        ),
        ("NFTablesProxyMod", True, "unrecognized feature gate: NFTablesProxyMod; did you mean NFTablesProxyMode?"),
        ("nftablesproxymode", True, "unrecognized feature gate: nftablesproxymode; did you mean NFTablesProxyMode?"),
        ("SupportIPVSProxyMode", True, "unrecognized feature gate: SupportIPVSProxyMode"),
    ],
)
def test_refused_gates(name, value, problem):
    assert gate_problem(name, value) == problem


def test_the_gates_that_help_shows_are_known():
    assert ("NativeHistograms", "ALPHA - default=false") in PROXY_GATES
    assert {name for name, _ in PROXY_GATES} <= GATES.keys()


def test_stages_and_defaults():
    assert {name: GATES[name] for name in ("AllAlpha", "WatchListClient", "SELinuxMount", "KMSv1", "WinDSR")} == {
        "AllAlpha": (Stage.ALPHA, False, False),
        "WatchListClient": (Stage.BETA, True, False),
        "SELinuxMount": (Stage.BETA, False, False),
        "KMSv1": (Stage.DEPRECATED, False, False),
        "WinDSR": (Stage.GA, True, True),
    }
    assert len(GATES) == 244


def states(**gates):
    return {state.name: state.enabled for state in gate_states(gates)}


def test_states_without_any_set_are_the_defaults():
    assert states() == {name: gate.default for name, gate in GATES.items()}


def test_all_alpha_and_all_beta_hold_for_what_is_not_named():
    found = states(AllAlpha=True, AllBeta=False, CSIVolumeHealth=False, WatchList=True)
    assert (found["MemoryQoS"], found["CSIVolumeHealth"], found["AllAlpha"]) == (True, False, True)
    assert (found["WatchListClient"], found["WatchList"], found["AllBeta"]) == (False, True, False)
    assert (found["NFTablesProxyMode"], found["KMSv1"], found["AllowServiceExternalIPs"]) == (True, False, True)


def test_one_gate_is_as_among_all():
    for gates in ({}, {"AllAlpha": True, "CSIVolumeHealth": False}, {"AllBeta": False}):
        assert states(**gates) == {name: gate_enabled(gates, name) for name in GATES}


def test_who_sets_what_will_go_is_told():
    assert list(gate_warnings({"WatchList": True, "NFTablesProxyMode": True, "KMSv1": False})) == [
        "Setting deprecated feature gate KMSv1=false. It will be removed in a future release.",
        "Setting GA feature gate NFTablesProxyMode=true. It will be removed in a future release.",
    ]


def test_alpha_logging():
    assert alpha_logging({"LoggingAlphaOptions": True})
    assert alpha_logging({"AllAlpha": True})
    assert not alpha_logging({"AllAlpha": True, "LoggingAlphaOptions": False})
    assert not alpha_logging({})
