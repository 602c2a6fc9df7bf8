"""The checks of kube-proxy doctor: from facts that were gathered to findings. Pure; commands/checkup.py gathers."""
