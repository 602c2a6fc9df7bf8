"""Netlink: headers, attributes, dumps, batches, multicast groups."""
