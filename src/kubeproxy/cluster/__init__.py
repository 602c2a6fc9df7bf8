"""kubectl kubeproxy: sends one question to the kube-proxy of each node through kubectl, with the user's credentials and
rights. The plugin reads names from the API server, runs `kube-proxy COMMAND -o json` in the proxies' containers, and
checks, compares and prints the answers."""
