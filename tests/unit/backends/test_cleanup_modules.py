"""The modules that the running mode imports from other modes, to remove their leftovers."""

import subprocess
import sys

WHAT_IS_LOADED = """
import sys
from importlib import import_module
from kubeproxy.setup import modes
modes.interfaces()
for mode in modes.every():
    import_module(f"{mode.room}.cleanup")
print(*(name for name in sys.modules if name.endswith((".mode", ".backend")) and name.count(".") > 2))
"""


def test_cleaning_up_after_a_mode_does_not_load_the_mode():
    found = subprocess.run(
        [sys.executable, "-c", WHAT_IS_LOADED], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []
