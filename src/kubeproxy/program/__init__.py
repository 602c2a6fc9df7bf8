"""The process of the proxy: builds and connects its parts, opens its ports, drops capabilities, and ends."""
