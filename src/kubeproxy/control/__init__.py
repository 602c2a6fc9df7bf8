"""The unix socket by which commands on the node ask a running proxy. Only its owner and root can open it."""
