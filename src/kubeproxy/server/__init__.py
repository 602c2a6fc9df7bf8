"""The HTTP server for the health ports, the metrics port and the control socket. text.py sanitises text."""
