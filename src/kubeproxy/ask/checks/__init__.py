"""The checks of kube-proxy doctor: they turn facts into findings. Pure; ask/checks/checkup.py gathers the facts."""
