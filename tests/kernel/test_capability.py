"""A permitted capability becomes effective without other changes; dropped capabilities have no effect any more."""

import subprocess
import sys

import pytest

# Runs in a separate process: drops CAP_NET_ADMIN in the way that the test selects, then tries to use it.
_PROGRAM = """
import ctypes, struct, sys
from kubeproxy.kernel.proc.capability import raise_net_admin

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


# Runs in a separate process as well: prints the capabilities before and after, and those of a child.
_KEEPS = """
import os, subprocess, sys, threading, time
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.capability import Capability, beyond_permission, forbid_new_privileges, held, keep_only

closed, open_ = sys.argv[1:3]
print(beyond_permission([closed, open_, "/nonexistent"]))
assert open(closed).read() == "x"
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
try:
    keep_only({Capability.NET_ADMIN})
except ApplyError as error:
    print(error)
ended.set()
thread.join()
while len(os.listdir("/proc/self/task")) > 1:  # Python says that it has ended before the kernel does
    time.sleep(0.001)
keep_only({Capability.NET_ADMIN, Capability.NET_RAW})
forbid_new_privileges()
print(sorted(one.label for one in held()))
names = "CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs"
print(subprocess.run(["grep", "-E", names, "/proc/self/status"], capture_output=True, text=True).stdout)
try:
    open(closed)
except PermissionError:
    print("closed")
"""


def test_dropped_capabilities_are_missing_in_children_too(tmp_path):
    closed, opened = tmp_path / "closed", tmp_path / "open"
    for path in (closed, opened):
        path.write_text("x")
    closed.chmod(0o000)
    done = subprocess.run(
        [sys.executable, "-c", _KEEPS, closed, opened], capture_output=True, text=True, check=True, timeout=60
    )
    few = f"{1 << 12 | 1 << 13:016x}"
    none = f"{0:016x}"
    assert done.stdout.split("\n") == [
        str([str(closed)]),
        "cannot drop capabilities: 2 threads run already",
        "['CAP_NET_ADMIN', 'CAP_NET_RAW']",
        *[f"CapInh:\t{none}", f"CapPrm:\t{few}", f"CapEff:\t{few}", f"CapBnd:\t{few}", f"CapAmb:\t{none}"],
        *["NoNewPrivs:\t1", "", "closed", ""],
    ]
