"""Consequences of a commit: metrics, health, events, stale UDP flows, log lines, systemd's status."""
