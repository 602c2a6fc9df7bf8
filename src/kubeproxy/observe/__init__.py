"""Metrics, health servers, events and logs: what an operator sees."""
