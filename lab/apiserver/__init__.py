"""A Kubernetes API server in memory, for the lab. Its answers follow recordings of a real kube-apiserver 1.36.

`rest` holds the semantics (no sockets), `server` speaks HTTP, `store` keeps the objects and tells about changes.
"""
