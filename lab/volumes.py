"""Folders that the kubelet fills for a pod: ConfigMaps and service accounts, replaced atomically by a symlink.

FOLDER/name -> ..data/name, FOLDER/..data -> ..SERIAL, FOLDER/..SERIAL/name is the file. Source: the kubelet's
AtomicWriter (pkg/volume/util/atomic_writer.go).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path

from lab.apiserver.authentication import Tokens

_serials = itertools.count(1)


class Volume:
    """One mounted folder. A reader sees either all old files or all new files of a write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, files: Mapping[str, str]) -> None:
        """Replace all files of the folder."""
        data, link = self.folder / "..data", self.folder / "..data_tmp"
        old = data.resolve() if data.is_symlink() else None
        new = self.folder / f"..{next(_serials):08d}"
        new.mkdir()
        for name, text in files.items():
            (new / name).write_text(text)
        link.symlink_to(new.name)
        link.replace(data)
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        for path in self.folder.iterdir():
            if not path.name.startswith("..") and path.name not in files:
                path.unlink()
        if old is not None:
            shutil.rmtree(old)


class ServiceAccountVolume:
    """A pod's service account: token, ca.crt and namespace. rotate() replaces the token."""

    def __init__(self, folder: Path, tokens: Tokens, user: str, ca: Path) -> None:
        self._volume = Volume(folder)
        self._tokens = tokens
        self._user = user
        self._ca = ca.read_text()
        self._token = ""
        self.rotate(grace=0.0)

    @property
    def folder(self) -> Path:
        """The mount point in the pod."""
        return self._volume.folder

    def rotate(self, grace: float) -> None:
        """Write a new token; the API server refuses the previous token after `grace` seconds."""
        old, self._token = self._token, self._tokens.issue(self._user)
        namespace = self._user.split(":")[2]
        self._volume.write({"token": self._token, "ca.crt": self._ca, "namespace": namespace})
        if old:
            self._tokens.end(old, grace)
