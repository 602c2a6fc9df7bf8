"""The checks of `kube-proxy doctor`, which turn facts into findings. Only checkup.py and node.py gather facts."""
