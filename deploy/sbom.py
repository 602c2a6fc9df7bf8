"""Writes the image's bill of materials as SPDX 2.3 JSON: the packages of Debian and PyPI in it, with their versions.

python3 sbom.py run.lock var/lib/dpkg/status site-packages > kubeproxy.spdx.json

The packages are read from the image and compared with the lock: a package that the lock lacks ends the build.
deploy/release.py writes the bill of a release's files with the same functions. Standard library alone. If
SOURCE_DATE_EPOCH is set, it is the time in the document, and the same input gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

OURS = "kubeproxy"
NONE = "NOASSERTION"


class Part(NamedTuple):
    """One package: its kind is deb or pypi, its licence an SPDX expression or NONE; `purl` is its package URL.

    `hashes` are the SHA-256 of its files.
    """

    kind: str
    name: str
    version: str
    licence: str
    supplier: str
    purl: str
    hashes: tuple[str, ...] = ()


def normal(name: str) -> str:
    """Return a Python package's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> dict[str, str]:
    """Return the versions that a lock pins, by normal name."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.!+-]+)", lock, re.M)}


def of_debian(status: str) -> Iterator[Part]:
    """Yield the packages of dpkg's list, by name."""
    for block in sorted(re.split(r"\n\n+", status.strip())):
        fields = HeaderParser().parsestr(block)
        name, version = fields["Package"], fields["Version"]
        upstream = fields.get("Source", name).partition(" ")[0]
        about = f"arch={fields['Architecture']}&distro=debian-12&upstream={quote(upstream, safe='')}"
        purl = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?{about}"
        yield Part("deb", name, version, NONE, "Organization: Debian", purl)


def of_pypi(folder: Path, pins: dict[str, str]) -> Iterator[Part]:
    """Yield the Python packages of a folder, by name. Raises ValueError for a package whose version differs from the
    lock."""
    for path in sorted(folder.glob("*.dist-info/METADATA")):
        fields = HeaderParser().parsestr(path.read_text(encoding="utf-8"))
        name, version = normal(fields["Name"]), fields["Version"]
        if name != OURS and pins.get(name) != version:
            raise ValueError(f"{name} {version} is installed, and the lock has {pins.get(name, 'none')}")
        yield pinned(name, version)._replace(licence=fields.get("License-Expression", NONE))


def pinned(name: str, version: str) -> Part:
    """Return a Python package whose licence is not known."""
    return Part("pypi", name, version, NONE, NONE, f"pkg:pypi/{name}@{quote(version, safe='')}")


def document(parts: list[Part], created: float, tools: Sequence[Part] = ()) -> dict[str, Any]:
    """Return the document of these parts; `tools` are the packages that only the build needs.

    Its namespace follows from its content. Raises ValueError without exactly one package of ours.
    """
    ours = [part for part in parts if part.name == OURS]
    if len(ours) != 1:
        raise ValueError(f"{len(ours)} packages {OURS} are installed, instead of one")
    content = json.dumps([parts, tools])
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{OURS}-{ours[0].version}",
        "documentNamespace": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
            "creators": ["Tool: kubeproxy-sbom"],
        },
        "packages": [_package(part) for part in (*parts, *tools)],
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": _id(ours[0]),
            },
            *(
                {
                    "spdxElementId": _id(ours[0]),
                    "relationshipType": "DEPENDS_ON",
                    "relatedSpdxElement": _id(part),
                }
                for part in parts
                if part.name != OURS
            ),
            *(
                {
                    "spdxElementId": _id(part),
                    "relationshipType": "BUILD_DEPENDENCY_OF",
                    "relatedSpdxElement": _id(ours[0]),
                }
                for part in tools
            ),
        ],
    }


def _id(part: Part) -> str:
    return f"SPDXRef-{part.kind}-" + re.sub(r"[^A-Za-z0-9.-]", "-", part.name.replace("+", "-plus-"))


def _package(part: Part) -> dict[str, Any]:
    return {
        "SPDXID": _id(part),
        "name": part.name,
        "versionInfo": part.version,
        "supplier": part.supplier,
        "downloadLocation": NONE,
        "filesAnalyzed": False,
        **({"checksums": [_checksum(value) for value in part.hashes]} if part.hashes else {}),
        "licenseConcluded": NONE,
        "licenseDeclared": part.licence,
        "copyrightText": NONE,
        "primaryPackagePurpose": "APPLICATION" if part.name == OURS else "LIBRARY",
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": part.purl}
        ],
    }


def _checksum(value: str) -> dict[str, str]:
    return {"algorithm": "SHA256", "checksumValue": value}


def main() -> int:
    """Read the three arguments, print the document; return the exit code."""
    lock, status, folder = map(Path, sys.argv[1:])
    created = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    try:
        parts = [*of_pypi(folder, locked(lock.read_text())), *of_debian(status.read_text(encoding="utf-8"))]
        print(json.dumps(document(parts, created), indent=1))
    except ValueError as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
