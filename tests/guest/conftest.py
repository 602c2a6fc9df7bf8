"""What is in inside/ runs under the guest's kernel only: test_in_guest.py boots it and sets the variable. What is in
machine/ runs in an emulated machine: make machine.
"""

from __future__ import annotations

import os

collect_ignore = ["machine"] if os.environ.get("KUBEPROXY_GUEST") else ["inside", "machine"]
