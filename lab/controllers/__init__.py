"""The parts of kube-controller-manager and kube-scheduler that the lab needs.

Each is level-triggered: a change in the store marks a key as dirty, and sync() compares the actual with the desired
state. They subscribe to the store of this process, and write through `rest`.
"""
