"""The checks of kube-proxy doctor: they turn facts into findings. Pure; checkup.py and node.py gather the facts."""
