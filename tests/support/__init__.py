"""Shared code of the tests: fakes of the kernel, builders of objects, clusters for scenarios, the guest.

It contains no tests. pytest finds the package through its `pythonpath`, other programs through the installation in
.venv."""
