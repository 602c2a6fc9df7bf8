"""A capability that is permitted comes into effect, and nothing else changes."""

import subprocess
import sys

import pytest

# In a process of its own: gives up CAP_NET_ADMIN in the way that the test says, then asks for it.
_PROGRAM = """
import ctypes, struct, sys
from kubeproxy.kernel.capability import raise_net_admin

def shown():
    lines = open("/proc/self/status").read().splitlines()
    return [int(line.split()[1], 16) for line in lines if line.startswith(("CapEff", "CapPrm"))]

libc = ctypes.CDLL(None)
header, rows = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
assert libc.capget(header, rows) == 0
effective, permitted, *others = struct.unpack("=6I", rows.raw)
lost = struct.pack("=6I", effective & ~0x1000, permitted & int(sys.argv[1], 16), *others)
assert libc.capset(header, lost) == 0
before = shown()
raise_net_admin()
print(*before, *shown())
"""


@pytest.mark.parametrize(
    ("kept", "gained"), [pytest.param("ffffffff", 0x1000, id="permitted"), pytest.param("ffffefff", 0, id="lost")]
)
def test_it_comes_into_effect_only_where_permitted(kept, gained):
    done = subprocess.run([sys.executable, "-c", _PROGRAM, kept], capture_output=True, text=True, check=True)
    permitted, effective, permitted_then, effective_then = map(int, done.stdout.split())
    assert not effective & 0x1000
    assert permitted_then == permitted
    assert effective_then == effective | gained
