"""What is in inside/ runs under the guest's kernel only: test_in_guest.py boots it and sets the variable."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("KUBEPROXY_GUEST") else ["inside"]
