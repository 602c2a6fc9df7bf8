"""The duties of process 1 for orphaned processes, tested in a process that also adopts orphans."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import ctypes, os, subprocess, sys, time
    from kubeproxy.kernel.proc.processes import Orphans

    def left():
        found = map(int, filter(str.isdecimal, os.listdir("/proc")))
        return [pid for pid in found if state(pid) == ["Z", str(os.getpid())]]

    def state(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
        except OSError:
            return []

    def until(count):
        while len(left()) != count:
            time.sleep(0.01)

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    orphans = Orphans()
    assert orphans.reap() == 0  # without any child
    own = subprocess.Popen(["true"])  # its end is for whoever waits for it
    subprocess.run(["sh", "-c", "sleep 0.05 & sleep 0.05 &"], start_new_session=True)  # as a plugin that forks
    subprocess.run(["setsid", "-f", "true"], start_new_session=True)  # as one that leaves a daemon
    until(4)
    assert orphans.reap() == 0  # whoever has a child ended just now may be about to take its end
    assert orphans.reap() == 3
    assert left() == [own.pid]
    assert own.wait() == 0
    assert orphans.reap() == 0
    print("done")
    """
)


def test_orphans_are_reaped_and_own_children_are_left_to_their_waiters():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
