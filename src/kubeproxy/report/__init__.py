"""Reports the work of the proxy in metrics, health, Events, log lines and systemd's status; removes stale UDP flows."""
