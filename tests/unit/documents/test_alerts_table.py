"""docs/monitoring.md shows the alerts of deploy/alerts as they are."""

import yaml

from support.documents import document
from support.places import ROOT


def test_the_table_is_what_the_rule_file_says() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/alerts/kube-proxy.rules.yaml").read_text())["groups"]
    rows = [
        [
            f"{rule['alert']} ({rule['labels']['severity']})",
            f"`{' '.join(rule['expr'].split())}`" + (f", for {rule['for']}" if "for" in rule else ""),
            rule["annotations"]["description"],
            rule["annotations"]["runbook"],
        ]
        for rule in group["rules"]
    ]
    assert document("docs/monitoring.md").table("Alerts") == rows
