"""The checks of `kube-proxy doctor`, which turn facts into findings."""
