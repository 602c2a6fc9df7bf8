"""Interfaces, addresses and routes of the network namespace, over rtnetlink."""
