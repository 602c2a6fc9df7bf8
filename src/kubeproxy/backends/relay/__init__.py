"""Carrying connections in user space: no mode of its own, but what modes share that end connections at the proxy."""
