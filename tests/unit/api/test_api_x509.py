"""Expiry of certificates: read from PEM, and reported after a rotation."""

import asyncio
import subprocess
from base64 import b64encode
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.api.cluster import Cluster, Trust, parse_server, validities
from kubeproxy.api.credentials import Credentials, KeyPair
from support.places import ROOT

TLS = ROOT / "tests/support/tls"


def openssl_says(path, which="-enddate"):
    command = ["openssl", "x509", "-in", str(path), "-noout", which, "-dateopt", "iso_8601"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    date = text.strip().partition("=")[2].removesuffix("Z")
    return datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()


def expiries(pem):
    return [validity.ends for validity in validities(pem)]


@pytest.fixture(params=[30, 20_000], ids=["UTCTime", "GeneralizedTime"])
def certificate(tmp_path, request):
    path = tmp_path / "certificate"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(tmp_path / "key")]
    days = ["-days", str(request.param)]
    subprocess.run(
        ["openssl", "req", "-x509", *curve, "-out", str(path), "-subj", "/CN=x", *days], check=True, capture_output=True
    )
    return path


def test_each_certificate_of_a_file(certificate):
    assert expiries(certificate.read_bytes()) == [openssl_says(certificate)]
    both = (TLS / "client.crt").read_bytes() + b"\n# words\n" + certificate.read_bytes()
    assert expiries(both) == [openssl_says(TLS / "client.crt"), openssl_says(certificate)]


def test_a_certificate_starts_at_its_not_before_time(certificate):
    ((begins, _),) = validities(certificate.read_bytes())
    assert begins == openssl_says(certificate, "-startdate")


def test_unreadable_certificates_are_left_out():
    broken = b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----\n"
    assert expiries(broken % b"MII=" + (TLS / "ca.crt").read_bytes()) == [openssl_says(TLS / "ca.crt")]
    assert expiries(b"") == expiries(broken % b"...") == []


@given(st.binary(max_size=200))
def test_junk_is_no_certificate(junk):
    expiries(b"-----BEGIN CERTIFICATE-----\n" + b64encode(junk) + b"\n-----END CERTIFICATE-----\n")


def ends(known):
    return {name: validity.ends for name, validity in known.items()}


def test_the_clients_and_the_last_of_the_authorities_count(certificate, tmp_path):
    pair = KeyPair((TLS / "client.crt").read_bytes() + certificate.read_bytes(), (TLS / "client.key").read_bytes())
    both = (TLS / "ca.crt").read_bytes() + certificate.read_bytes()
    known = Trust(ca_data=both, certificate_data=pair.certificate, key_data=pair.key).validities(None)
    client, authority = openssl_says(TLS / "client.crt"), openssl_says(TLS / "ca.crt")
    assert ends(known) == {"client": client, "authority": max(authority, openssl_says(certificate))}
    assert ends(Trust(ca_data=both, insecure=True).validities(pair)) == {"client": client}  # from a plugin
    assert Trust().validities(None) == {}


def test_rotations_are_reported(certificate, tmp_path):
    ca, told = tmp_path / "ca.crt", []
    ca.write_bytes((TLS / "ca.crt").read_bytes())
    cluster = Cluster(parse_server("https://127.0.0.1:1", "test"), Trust(ca_file=str(ca)), Credentials())
    cluster.on_certificates(told.append)
    ca.write_bytes(certificate.read_bytes())
    for _ in range(2):
        asyncio.run(cluster.tls_context())
    assert told == [{"authority": openssl_says(TLS / "ca.crt")}, {"authority": openssl_says(certificate)}]


@pytest.mark.timeout(20)
def test_beginnings_without_an_end_are_passed_over_once():
    """The search for the end of each certificate once read the whole file: 1 MB of them took an hour."""
    begin = b"-----BEGIN CERTIFICATE-----"
    assert validities(begin * (1 << 15)) == []
    assert validities(begin * 3 + b"AA==-----END CERTIFICATE-----") == []
