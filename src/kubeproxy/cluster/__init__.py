"""kubectl kubeproxy: one question to the kube-proxy of each node, through the user's own kubectl. The credentials and
rights are those of the kubectl that runs this plugin. The plugin reads names from the API server, runs `kube-proxy
COMMAND -o json` in the proxies' containers, and checks, compares and prints the answers.
"""
