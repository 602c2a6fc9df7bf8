"""Connections of Services as connection tracking has them: counted by Service, port, endpoint and client."""
