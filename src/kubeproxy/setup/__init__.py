"""From options to settings, modes and sources of objects of a proxy on this node."""
