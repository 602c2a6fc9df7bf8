"""The demo: the whoami example, played for real against a kube-proxy, with every answer checked."""
