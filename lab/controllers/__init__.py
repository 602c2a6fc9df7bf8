"""The parts of kube-controller-manager and kube-scheduler that the lab needs.

Each is level-triggered: a change in the store says which key to look at again, and sync() compares what is with what
should be. They subscribe to the store in the process and write through `rest`.
"""
