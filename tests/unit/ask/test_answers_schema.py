"""The schema of JSON answers is valid, and answers that need no kernel conform to it.

test_state.py checks /debug/state against it, tests/scenarios/test_answers.py the answers of a running proxy.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import fields, replace

from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask.finding import Probe
from kubeproxy.ask.flows.follow import Cost, FlowEvent
from kubeproxy.ask.flows.fullness import Filler, Fullness
from kubeproxy.ask.flows.users import ClientUse, EndpointUse, PortUse
from kubeproxy.ask.kernel.journeys import Journey, Met
from kubeproxy.ask.kernel.looks import Seen
from kubeproxy.ask.kernel.present import Report
from kubeproxy.ask.kernel.verdicts import TracedReply, Verdict
from kubeproxy.ask.outlook import Outlook
from kubeproxy.ask.question import Elsewhere
from kubeproxy.ask.shifts import Shift
from kubeproxy.ask.state import SCHEMA_VERSION
from kubeproxy.ask.why import Missing, Target, Why
from kubeproxy.commands import ALONE, COMMANDS, services
from kubeproxy.commands.parsers import run
from kubeproxy.commands.shadow import LastedDifference, ShadowReport
from support.answers import SCHEMA, valid

WEB = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "shop", "annotations": {"a": "b"}},
    "spec": {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.10",
        "clusterIPs": ["10.96.0.10"],
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "healthCheckNodePort": 30100,
        "externalTrafficPolicy": "Local",
        "sessionAffinity": "ClientIP",
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}],
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}},
}
SLICE = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    "endpoints": [
        {"addresses": ["10.244.0.7"], "nodeName": "here", "zone": "a"},
        {"addresses": ["10.244.1.7"], "nodeName": "there", "conditions": {"ready": False, "serving": False}},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> list[str]:
    for name, found in (("web", WEB), ("slice", SLICE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return ["--manifests", str(tmp_path), "--hostname-override", "here", "-o", "json"]


def test_it_is_a_schema_with_a_definition_for_each_command():
    Draft202012Validator.check_schema(SCHEMA)
    assert COMMANDS.keys() - ALONE <= SCHEMA["$defs"].keys()
    assert {one["properties"]["schemaVersion"]["const"] for one in _versioned()} == {SCHEMA_VERSION}
    assert (
        len(_versioned()) == len(COMMANDS.keys() - ALONE) + 5
    )  # one Service, /debug/state, a cluster, a shadow, an error


def _versioned():
    return [one for one in SCHEMA["$defs"].values() if "schemaVersion" in one.get("properties", {})]


@pytest.mark.parametrize(
    "kind",
    [
        *(Met, Journey, TracedReply, Verdict, Cost, ClientUse, EndpointUse, PortUse, FlowEvent, Filler, Fullness),
        *(Missing, Target, Why, Elsewhere, Probe, Outlook, Shift, ShadowReport, LastedDifference),
    ],
)
def test_fields_have_the_names_of_the_schema(kind):
    names = {"Fullness": "conntrack", "Outlook": "plan", "ShadowReport": "shadow"}
    known = SCHEMA["$defs"][names.get(kind.__name__, kind.__name__)]["properties"].keys()
    assert {field.encode_name for field in fields(kind)} == known - {"schemaVersion", "version"}


def test_verify_has_the_fields_of_the_schema():
    report = Report(SimpleNamespace(mode="nftables"), Seen(0), (), ())
    assert report.fields().keys() == SCHEMA["$defs"]["verify"]["properties"].keys() - {"schemaVersion", "version"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("services", ["services"]),
        ("service", ["services", "shop/web"]),
        ("service", ["services", "shop/none"]),
        ("why", ["why", "10.1.2.3", "shop/web:80", "--no-probe"]),
        ("why", ["why", "192.0.2.1", "203.0.113.1:80", "--no-probe"]),
        ("why", ["why", "node", "198.51.100.1:80", "--no-probe"]),
    ],
)
def test_answers_about_a_folder_match_its_files(name, words, folder, capfd):
    run([*words, *folder])
    assert valid(name, capfd.readouterr().out)["schemaVersion"] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("seconds", "status", "age"), [(15.0, 0, ""), (30.0, 0, "30 seconds"), (480.0, 2, "8 minutes")]
)
@pytest.mark.parametrize("words", [["services"], ["services", "shop/web"]])
def test_services_say_since_when_the_objects_are_outdated(words, seconds, status, age, folder, capfd, monkeypatch):
    watched = (WatchStanding(resource="services", synced=True, connected=False, stale=seconds),)
    reach = Reach(server="https://h", trouble="h: refused", watched=watched, certificates={})
    monkeypatch.setattr(services, "knowing", lambda asked: replace(asked.facts(), reach=reach))
    assert run([*words, *folder]) == status
    made = valid(words[0] if len(words) == 1 else "service", capfd.readouterr().out)
    assert [f"known {age} ago" in one["why"] for one in made.get("findings", ()) if one["about"] == "api"] == [
        True
    ] * bool(age)
    assert run([*words, *folder[:-2]]) == status
    marked = f"  {'x' if status else '-'}  the API server cannot be reached at"
    assert (marked in capfd.readouterr().out) is bool(age)
