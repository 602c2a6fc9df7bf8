"""A browser for tests, and a fake proxy that serves only the page."""
