"""docs/monitoring.md shows the same alerts as deploy/alerts, each below the heading in its runbook_url."""

import re

import yaml

from support.documents import document
from support.places import ROOT

RULES = yaml.safe_load((ROOT / "deploy/alerts/kube-proxy.rules.yaml").read_text())["groups"][0]["rules"]
PAGE = document("docs/monitoring.md")


def test_each_alert_is_documented_as_in_the_rule_file() -> None:
    text = PAGE.path.read_text().split("## Alerts\n", 1)[1].split("\n## ", 1)[0]
    shown = {
        name: [" ".join(paragraph.split()) for paragraph in body.strip().split("\n\n")]
        for name, body in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    }
    assert shown == {
        rule["alert"]: [
            f"{rule['labels']['severity'].capitalize()}: `{' '.join(rule['expr'].split())}`"
            + (f", for {rule['for']}." if "for" in rule else "."),
            rule["annotations"]["description"],
            f"Ask: {rule['annotations']['runbook']}",
        ]
        for rule in RULES
    }


def test_each_alert_names_its_place_on_the_page() -> None:
    for rule in RULES:
        name, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (name, anchor) == ("docs/monitoring.md", rule["alert"].lower())
        assert anchor in PAGE.anchors()
