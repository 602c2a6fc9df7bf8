"""The certificate authority of the cluster, made with the openssl command, for TLS and client certificates."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kubeproxy.errors import Unsupported

SERVER_NAMES = (
    "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    "IP:127.0.0.1,IP:::1,IP:10.96.0.1,IP:192.168.100.1"
)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the certificate of the authority, and certificates and keys of the server and of a client."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS settings of the API server; client certificates are optional."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.load_cert_chain(self.server, self.server_key)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


def make_certificates(folder: Path, user: str = "system:kube-proxy", days: int = 2) -> Certificates:
    """Make an authority, a server certificate and a certificate for `user`, valid for `days`; this takes about 50 ms.

    Raises Unsupported if the openssl command is missing.
    """
    if shutil.which("openssl") is None:
        raise Unsupported("openssl is not installed, which the lab's TLS needs: apt-get install openssl")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = Certificates(*(folder / n for n in ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")))
    key = _new_key(days)
    authority = ["-CA", str(result.ca), "-CAkey", str(folder / "ca.key")]
    ca_uses = "keyUsage=critical,keyCertSign,cRLSign"
    _request(folder / "ca.key", result.ca, "/CN=lab-ca", [*key, "-addext", ca_uses])
    names = ["-addext", f"subjectAltName={SERVER_NAMES}", "-addext", "basicConstraints=critical,CA:FALSE"]
    _request(result.server_key, result.server, "/CN=kube-apiserver", [*key, *authority, *names])
    make_client(folder, result.client, result.client_key, user, days)
    return result


def make_client(folder: Path, certificate: Path, key: Path, user: str, days: int) -> None:
    """Create a client's certificate and key, signed by the authority in a folder of make_certificates(). Raises
    Unsupported."""
    authority = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    uses = ["-addext", "extendedKeyUsage=clientAuth", "-addext", "basicConstraints=critical,CA:FALSE"]
    _request(key, certificate, f"/CN={user}", [*_new_key(days), *authority, *uses])


def _new_key(days: int) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", str(days)]


def _request(key: Path, certificate: Path, subject: str, options: list[str]) -> None:
    key.touch(mode=0o600)
    argv = ["openssl", "req", "-x509", "-subj", subject, "-keyout", str(key), "-out", str(certificate), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unsupported(f"openssl req failed, OpenSSL 3 is needed: {done.stderr.strip()}")
