"""A browser for tests, and a proxy that only speaks what the page reads."""
