"""Netlink, as every family speaks it: headers, attributes, batches, multicast groups."""
