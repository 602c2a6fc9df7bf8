"""The checks of kube-proxy doctor: from facts that were gathered to findings. Pure; ask/checks/checkup.py gathers."""
