"""One process: its parts built and wired, its ports, its capabilities, its end."""
