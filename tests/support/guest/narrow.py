"""Runs a command for which ptrace reports only the SSE registers: `narrow.py COMMAND ...`.

User-mode Linux 6.1 keeps 2,696 bytes of extended state for a process. If the processor has more (AMX: 11,008), the host
does not accept such a state, and the guest's first process dies ("ptrace set fp regs failed, errno = 14"). If the host
reports no extended state, the guest's kernel uses the old request for the 512 bytes of FXSAVE. This suffices for
programs that do not use wider registers, because each page fault loses the upper halves of these: WIDE_UNUSED in the
environment of all programs makes glibc and OpenSSL avoid them. The kernel starts modprobe without this environment, so
`starter` builds a program that the kernel starts instead. Runs under `python -I -S` with the standard library alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

WIDE_UNUSED = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-AVX_Fast_Unaligned_Load",
    "OPENSSL_ia32cap": "~0x1000000000000000:0x0",
}

PTRACE_GETREGSET, NT_X86_XSTATE = 0x4204, 0x202  # linux/ptrace.h, linux/elf.h
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2  # linux/prctl.h, linux/seccomp.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EIO
SYS_PTRACE, AUDIT_ARCH_X86_64 = 101, 0xC000003E
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h: a word of struct seccomp_data, a jump, the verdict
NUMBER, ARCH, REQUEST, KIND = 0, 4, 16, 32  # offsets in struct seccomp_data: call, argument 0, argument 2


def too_wide(cpuinfo: str) -> bool:
    """Return whether processors have more state than the guest's kernel can store, from the text of /proc/cpuinfo."""
    return any(" amx_tile" in line for line in cpuinfo.splitlines() if line.startswith("flags"))


def wide_here() -> bool:
    """Return whether this machine's processors have more state than the guest's kernel can store."""
    return too_wide(Path("/proc/cpuinfo").read_text())


def program() -> bytes:
    """Return the filter, an array of struct sock_filter: reading NT_X86_XSTATE is refused (EIO)."""
    steps = []
    conditions = ((ARCH, AUDIT_ARCH_X86_64), (NUMBER, SYS_PTRACE), (REQUEST, PTRACE_GETREGSET), (KIND, NT_X86_XSTATE))
    for left, (offset, value) in zip(range(len(conditions) - 1, -1, -1), conditions, strict=True):
        steps += [(LOAD, 0, 0, offset), (EQUAL, 0, 2 * left + 1, value)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def starter(path: str, environment: dict[str, str]) -> bytes:
    """Return an executable without libraries, which executes the program at `path` with the same arguments."""
    base, header = 0x400000, 64 + 56  # the load address; an ELF header and a program header
    code_size = 35
    words = [path, *(f"{name}={value}" for name, value in environment.items())]
    texts = b"".join(word.encode() + b"\0" for word in words)
    starts = [base + header + code_size + len(texts[: texts.index(word.encode() + b"\0")]) for word in words]
    pointers = base + header + code_size + len(texts)
    code = b"".join(
        (
            b"\x48\x8d\x74\x24\x08",  # lea rsi, [rsp + 8]: the arguments
            b"\xbf" + struct.pack("<I", starts[0]),  # mov edi, path
            b"\xba" + struct.pack("<I", pointers),  # mov edx, environment
            b"\xb8\x3b\x00\x00\x00\x0f\x05",  # mov eax, execve; syscall
            b"\xbf\x7f\x00\x00\x00\xb8\x3c\x00\x00\x00\x0f\x05",  # exit(127)
            b"\x90",
        )
    )
    body = code + texts + struct.pack(f"<{len(starts)}Q", *starts[1:], 0)
    size = header + len(body)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, 62, 1, base + header, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return elf + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000) + body


def main() -> None:
    """Install the filter for this process and its children, and execute the command."""
    code = program()
    held = ctypes.create_string_buffer(code, len(code))
    wanted = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))  # struct sock_fprog
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(wanted), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
