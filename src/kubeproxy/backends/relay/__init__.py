"""Relay of connections in user space, for userspace mode and for NodePorts on loopback."""
