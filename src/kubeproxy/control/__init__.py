"""The unix socket by which commands query a running proxy. Only its owner and root can open it."""
