"""What tests share: doubles of the kernel's side, builders of objects, clusters for scenarios, the guest.

Nothing here is a test. pytest finds the package by its `pythonpath`, other programs by the installation in .venv.
"""
