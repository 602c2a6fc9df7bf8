"""Answers in modes without recordings: conformance runs of these modes are compared with them.

In userspace mode tools/conformance derives the answers from the recordings of the other modes. In ipvs mode the answers
are those recorded in iptables mode, or intended differences according to the runner in the guest.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest

from kubeproxy.model.answer import answer
from kubeproxy.setup import modes
from support.guest.differences import REASONS, Difference, explain
from support.iptables_cases import case, planner_of
from support.places import ROOT
from unit.model.test_answer_recordings import HERE, NUMBERS, packet, predicted


def _conformance():
    loader = SourceFileLoader("conformance_tool", str(ROOT / "tools" / "conformance"))
    spec = spec_from_loader(loader.name, loader)
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


CARRIED = _conformance().carried


def asked(number: str, mode: str):
    """Yield (case, step number, step, probe, recorded in iptables and nftables mode, answer) of every probe."""
    played = case(number)
    config = dict(played["config"])
    block = {"masqueradeAll": config.pop("masqueradeAll", False)}
    for count, step in enumerate(played["steps"]):
        planner = planner_of({**config, "mode": mode, "iptables": block}, step["objects"])
        recorded = zip(step["probes"], step["expected"]["iptables"], step["expected"]["nftables"], strict=True)
        for probe, iptables, nftables in recorded:
            made = answer(planner, packet(probe), HERE, modes.named(mode).habits)
            yield played, count, probe, iptables, nftables, made


@pytest.mark.parametrize("number", NUMBERS)
def test_userspace(number: str) -> None:
    for played, _, probe, iptables, nftables, made in asked(number, "userspace"):
        wanted = CARRIED(probe, played["config"].get("nodePortAddresses"), iptables, nftables)
        assert predicted(made, probe, wanted) == wanted, (probe, made)


def reason(played, step, probe, iptables, made) -> str:
    """Return the reason for an intended difference from the recorded answer, '' for no difference; fail without a
    reason.
    """
    saw = predicted(made, probe, iptables)
    if saw == iptables:
        return ""
    what = (probe["what"], probe["service"].partition(":")[0], probe["from"], probe["dst"])
    found = explain(Difference(played, step, *what, iptables, saw))
    assert found, (probe, iptables, saw, made)
    return found


def test_ipvs() -> None:
    met = set()
    for number in NUMBERS:
        for played, step, probe, iptables, _, made in asked(number, "ipvs"):
            met.add(reason(played, step, probe, iptables, made))
    assert met == {"", *REASONS}
