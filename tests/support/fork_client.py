"""Runs a command line of kube-proxy with this program's outputs, in a fork of the process of forking.py.

Arguments: the name of that process' socket, the network namespace, and the words. It imports little, because it starts
often.
"""

import json
import os
import socket
import sys

name, namespace, *words = sys.argv[1:]
read, write = os.pipe()
request = {"words": words, "namespace": namespace, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(f"\0{name}")
    socket.send_fds(server, [json.dumps(request).encode()], [1, 2, write])
os.close(write)
os.read(read, 4)  # the pid of the fork
sys.exit(int.from_bytes(os.read(read, 4), sys.byteorder, signed=True) % 256)
