"""One process: its parts built and connected, its ports, its capabilities, its end."""
