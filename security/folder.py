"""Makes a cluster secret folder: what `paceline certs` does.

In: a folder, names that clients outside the cluster's own may check, days. Out: the files of `security.secrets`,
readable by their owner alone. Invariants: existing secrets are never overwritten unless asked; the authority's key
is forgotten once it has signed, so nobody can ever issue another certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from security.secrets import (
    AUTHORITY,
    CERTIFICATE,
    CLUSTER_NAME,
    CURVE,
    FILES,
    KEY,
    SHARED,
    SHARED_BYTES,
    Secrets,
    SecretsError,
    load,
)

DAYS = 3650
_ALWAYS = (CLUSTER_NAME, "localhost", "127.0.0.1", "::1")
_SKEW = datetime.timedelta(hours=1)  # clocks of hosts differ


def make(folder: Path, names: Sequence[str] = (), days: int = DAYS, force: bool = False) -> Secrets:
    """Raises `SecretsError`."""
    if not force and (there := [name for name in FILES if (folder / name).exists()]):
        raise SecretsError(
            f"{folder} already holds {', '.join(there)}; with --force they are replaced, after which every process "
            "of the cluster needs the new ones"
        )
    alternatives = _alternatives(names)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.mkdir(mode=0o700)
        for name, text in _contents(alternatives, days).items():
            descriptor = os.open(new / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
        for name in FILES:
            (new / name).replace(folder / name)
    except OSError as error:
        raise SecretsError(f"cannot write to {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return load(folder)


def _contents(alternatives: list[x509.GeneralName], days: int) -> dict[str, bytes]:
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Paceline cluster authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLUSTER_NAME)])
    authority = (
        _begun(issuer, issuer, authority_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _begun(subject, issuer, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return {
        AUTHORITY: authority.public_bytes(Encoding.PEM),
        CERTIFICATE: certificate.public_bytes(Encoding.PEM),
        KEY: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        CURVE: zmq.curve_keypair()[1] + b"\n",
        SHARED: secrets.token_hex(SHARED_BYTES).encode() + b"\n",
    }


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys((*_ALWAYS, *names)):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
            continue
        except ValueError:
            pass
        try:
            if not name or any(character in name for character in " /:@"):
                raise ValueError("not a host name")
            found.append(x509.DNSName(name))
        except ValueError as error:
            raise SecretsError(f"--name {name!r} is neither a host name nor an IP address: {error}") from None
    return found
