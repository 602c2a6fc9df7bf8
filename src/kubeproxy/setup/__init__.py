"""From options to what a proxy on this node starts with: settings, modes, sources of objects."""
