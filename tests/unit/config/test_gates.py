"""Feature gates: known, locked and unknown ones."""

import re

import pytest

from kubeproxy.config.gates import (
    GATES,
    LATER,
    NOT_SWITCHED,
    Stage,
    gate_enabled,
    gate_problem,
    gate_states,
    gate_warnings,
    proxy_gates,
)
from support.places import ROOT

SOURCE = "".join(
    path.read_text()
    for path in (ROOT / "src" / "kubeproxy").rglob("*.py")
    if path.name != "gates.py" or path.parent.name != "config"
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


def test_the_gates_that_help_shows_are_known_and_read():
    assert ("AllowServiceExternalIPs", "default=true") in proxy_gates()
    assert ("LoggingAlphaOptions", "ALPHA - default=false") in proxy_gates()
    shown = {name for name, _ in proxy_gates()}
    assert shown <= GATES.keys()
    assert not shown & NOT_SWITCHED.keys()
    read = {name for name in GATES if re.search(rf'"{name}"', SOURCE)}
    assert read == shown - {"AllAlpha", "AllBeta"}


@pytest.mark.parametrize(
    ("gates", "told"),
    [
        ({"NativeHistograms": True}, ["NativeHistograms=true has no effect here: metrics are served as text"]),
        ({"NativeHistograms": False}, []),
        ({"NFTablesNetlink": False}, ["NFTablesNetlink=false has no effect here: rules are always read over netlink"]),
        ({"NFTablesNetlink": True, "ContextualLogging": True, "ClientsAllowCARotation": True}, []),
        ({"ClientsAllowCARotation": False}, ["ClientsAllowCARotation=false has no effect here: a changed file"]),
        ({"AllAlpha": True, "NativeHistograms": False}, ["ClientsAllowCBOR=true has", "ClientsPreferCBOR=true has"]),
    ],
)
def test_gates_without_effect_are_reported(gates, told):
    found = [line.removeprefix("Feature gate ") for line in gate_warnings(gates) if "no effect" in line]
    assert bool(found) is bool(told)
    assert all(any(line.startswith(start) for line in found) for start in told)


def test_stages_and_defaults():
    assert {name: GATES[name] for name in ("AllAlpha", "WatchListClient", "SELinuxMount", "KMSv1", "WinDSR")} == {
        "AllAlpha": (Stage.ALPHA, False, False),
        "WatchListClient": (Stage.BETA, True, False),
        "SELinuxMount": (Stage.BETA, False, False),
        "KMSv1": (Stage.DEPRECATED, False, False),
        "WinDSR": (Stage.GA, True, True),
    }
    assert len(GATES) == 243 + len(LATER)


def states(**gates):
    return {name: enabled for name, _, enabled in gate_states(gates)}


def test_states_without_any_set_are_the_defaults():
    assert states() == {name: gate.default for name, gate in GATES.items()}


def test_all_alpha_and_all_beta_apply_to_unnamed_gates():
    found = states(AllAlpha=True, AllBeta=False, CSIVolumeHealth=False, WatchList=True)
    assert (found["MemoryQoS"], found["CSIVolumeHealth"], found["AllAlpha"]) == (True, False, True)
    assert (found["WatchListClient"], found["WatchList"], found["AllBeta"]) == (False, True, False)
    assert (found["NFTablesProxyMode"], found["KMSv1"], found["AllowServiceExternalIPs"]) == (True, False, True)


def test_one_gate_is_as_among_all():
    for gates in ({}, {"AllAlpha": True, "CSIVolumeHealth": False}, {"AllBeta": False}):
        assert states(**gates) == {name: gate_enabled(gates, name) for name in GATES}


def test_gates_that_will_be_removed_are_reported():
    assert list(gate_warnings({"WatchList": True, "NFTablesProxyMode": True, "KMSv1": False})) == [
        "Setting deprecated feature gate KMSv1=false. It will be removed in a future release.",
        "Setting GA feature gate NFTablesProxyMode=true. It will be removed in a future release.",
    ]
