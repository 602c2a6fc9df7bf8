"""Counts the connections in connection tracking by Service, port, endpoint and client."""
