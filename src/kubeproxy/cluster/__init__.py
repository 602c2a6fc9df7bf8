"""kubectl kubeproxy: one question to the kube-proxy of each node, through the user's own kubectl.

The credentials and rights are those of the kubectl that runs this plugin. It reads names from the API server and runs
`kube-proxy COMMAND -o json` in the proxies' containers; their answers are checked, compared and printed here.
"""
