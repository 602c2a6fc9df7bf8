"""The HTTP server of the health ports, the metrics port and the control socket, and sanitised text."""
