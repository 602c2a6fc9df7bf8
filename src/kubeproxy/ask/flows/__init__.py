"""Connections of Services from connection tracking, counted by Service, port, endpoint and client."""
