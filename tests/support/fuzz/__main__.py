"""python -m support.fuzz TARGET MINUTES: makes inputs for one target with atheris, which `make fuzz` installs.

Inputs with new coverage are written to bench/out/fuzz/TARGET, failing inputs to tests/recordings/fuzz/TARGET.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import atheris

_WEIGHED = 64
"""One input of this number is checked for memory, which takes ten times as long."""

with atheris.instrument_imports(include=["kubeproxy"]):
    targets = importlib.import_module("support.fuzz.targets")
judging = importlib.import_module("support.fuzz.judge")


def main() -> None:
    name, minutes = sys.argv[1], float(sys.argv[2])
    entry = targets.TARGETS[name]
    kept, grown = targets.CORPUS / name, Path("bench/out/fuzz") / name
    for folder in (kept, grown):
        folder.mkdir(parents=True, exist_ok=True)
    words = grown.with_suffix(".words")
    words.write_text("".join('"' + word.replace('"', '\\"') + '"\n' for word in entry.words))
    count = 0

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        (judging.weigh if count % _WEIGHED == 0 else judging.judge)(entry.read, data)

    options = [
        f"-max_total_time={int(minutes * 60)}", f"-max_len={entry.longest}", "-timeout=10", "-rss_limit_mb=1024",
        f"-artifact_prefix={kept}/found-", "-print_final_stats=1",
    ]  # fmt: skip
    if entry.words:
        options.append(f"-dict={words}")
    atheris.Setup([sys.argv[0], *options, *sys.argv[3:], str(grown), str(kept)], one)
    atheris.Fuzz()


main()
