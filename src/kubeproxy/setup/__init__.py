"""Derives a proxy's settings, mode and source of objects on this node from its options."""
