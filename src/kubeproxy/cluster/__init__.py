"""kubectl kubeproxy: one question to the kube-proxy of each node, through the user's own kubectl.

The kubectl that runs this plugin has the credentials and the rights. It reads names from the API server and runs
`kube-proxy COMMAND -o json` in the proxies' containers; their answers are checked, compared and printed here.
"""
