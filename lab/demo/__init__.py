"""The demo: runs the whoami example against a real kube-proxy, and checks every answer."""
