"""One process: construction of its parts, its ports, its capabilities, and its end."""
