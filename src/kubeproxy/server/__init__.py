"""The HTTP server of the health ports, the metrics port and the control socket, and text that is safe to show."""
