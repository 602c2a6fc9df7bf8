"""Derives settings, modes and sources of objects of a proxy on this node from the options."""
