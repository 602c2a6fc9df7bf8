"""The checks of `kube-proxy doctor`, which turn facts into findings. Pure, except checkup.py and node.py, which gather
the facts."""
