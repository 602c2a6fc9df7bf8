"""Tests in inside/ run only under the guest's kernel: test_in_guest.py boots it and sets the variable. Tests in
machine/ run in an emulated machine: make machine.
"""

from __future__ import annotations

import os

collect_ignore = ["machine"] if os.environ.get("KUBEPROXY_GUEST") else ["inside", "machine"]
