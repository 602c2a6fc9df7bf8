#!/usr/bin/env python3
"""Writes copies of kube-proxy.rules.yaml for the chart and for kustomize, which cannot read files outside their
folders.

Run it after each change of the rules, without arguments; a test holds the copies to them.
"""

from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent
RULES = DEPLOY / "alerts/kube-proxy.rules.yaml"

MADE = "# Made by deploy/alerts/spread.py: change deploy/alerts/kube-proxy.rules.yaml and run it.\n"
OBJECT = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kube-proxy-py
  labels:
    k8s-app: kube-proxy-py
spec:
"""


def copies() -> dict[Path, str]:
    """Return the content of each copy, by path."""
    text = RULES.read_text(encoding="utf-8")
    groups = text[text.index("groups:") :]
    indented = "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))
    return {
        DEPLOY / "chart/alerts.yaml": MADE + groups,
        DEPLOY / "kustomize/monitoring/prometheusrule.yaml": MADE + OBJECT + indented,
    }


if __name__ == "__main__":
    for path, text in copies().items():
        path.write_text(text, encoding="utf-8")
