"""The cluster secret folder: what every process of a cluster holds in common, and nobody else.

In: a folder made by `paceline certs`. Out: `Secrets`, or `SecretsError` that says what is wrong and what to do.
Invariants: what was loaded fits together and has not expired; no secret is in a `repr`, so none gets into a log.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

log = logging.getLogger(__name__)

AUTHORITY, CERTIFICATE, KEY, CURVE, SHARED = "ca.crt", "tls.crt", "tls.key", "curve.key", "shared.key"
FILES = (AUTHORITY, CERTIFICATE, KEY, CURVE, SHARED)
CLUSTER_NAME = "cluster.paceline"  # in every certificate: members are checked by it, whatever their addresses are
SHARED_BYTES = 32
_LARGEST_FILE = 64 << 10


class SecretsError(ValueError):
    """The folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Secrets:
    folder: Path
    authority: bytes = field(repr=False)  # PEM, as the next two
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    curve_public: bytes = field(repr=False)  # Z85, as the next one; every member's, so to be told to no one else
    curve_secret: bytes = field(repr=False)
    shared: bytes = field(repr=False)
    expires: datetime.datetime  # of the certificate or its authority, whichever is first

    def derive(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose; from one of them no other is learnt."""
        return hmac.digest(self.shared, purpose.encode(), "sha256")

    @property
    def fingerprint(self) -> str:
        """Tells two folders apart, and nothing about either."""
        return hashlib.sha256(self.derive("fingerprint")).hexdigest()[:16]


def load(folder: Path, now: datetime.datetime | None = None) -> Secrets:
    """Raises `SecretsError`."""
    if not folder.is_dir():
        raise SecretsError(f"{folder} is not a folder; make one with `paceline certs {folder}`")
    texts = {name: _read(folder, name) for name in FILES}
    curve_public, curve_secret = _curve(folder, texts[CURVE])
    loaded = Secrets(
        folder=folder,
        authority=texts[AUTHORITY],
        certificate=texts[CERTIFICATE],
        key=texts[KEY],
        curve_public=curve_public,
        curve_secret=curve_secret,
        shared=_shared(folder, texts[SHARED]),
        expires=_check_certificate(folder, texts),
    )
    if loaded.expires <= (now or datetime.datetime.now(datetime.UTC)):
        raise SecretsError(
            f"the certificate in {folder} expired on {loaded.expires:%Y-%m-%d}; make new secrets with "
            f"`paceline certs --force {folder}`, give them to every process and restart all"
        )
    _warn_if_readable(folder)
    return loaded


def load_if(folder: str) -> Secrets | None:
    """`load`, where an empty name stands for none. Raises `SecretsError`."""
    return load(Path(folder)) if folder else None


def _read(folder: Path, name: str) -> bytes:
    try:
        with (folder / name).open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise SecretsError(
            f"{folder} lacks {name}; a folder of secrets is made by `paceline certs` and copied as a whole"
        ) from None
    except OSError as error:
        raise SecretsError(f"{folder / name} cannot be read: {error.strerror}") from None
    if len(text) > _LARGEST_FILE:
        raise SecretsError(f"{folder / name} is larger than {_LARGEST_FILE} bytes, so it is not what it should be")
    return text


def _curve(folder: Path, text: bytes) -> tuple[bytes, bytes]:
    secret = text.strip()
    try:
        return zmq.curve_public(secret), secret
    except (ValueError, zmq.ZMQError):
        raise SecretsError(f"{folder / CURVE} does not hold a key of 40 Z85 characters") from None


def _shared(folder: Path, text: bytes) -> bytes:
    try:
        shared = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        shared = b""
    if len(shared) != SHARED_BYTES:
        raise SecretsError(f"{folder / SHARED} does not hold {SHARED_BYTES} bytes as {2 * SHARED_BYTES} hex digits")
    return shared


def _check_certificate(folder: Path, texts: dict[str, bytes]) -> datetime.datetime:
    """When it ends. The key is the certificate's, the certificate the authority's, and for this use."""
    try:
        authority = x509.load_pem_x509_certificate(texts[AUTHORITY])
        certificate = x509.load_pem_x509_certificate(texts[CERTIFICATE])
        public = load_pem_private_key(texts[KEY], None).public_key()
    except (ValueError, TypeError) as error:
        raise SecretsError(f"a certificate or key in {folder} is not readable PEM: {error}") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise SecretsError(f"{folder / KEY} is not the key of {CERTIFICATE}: the files are of two different clusters")
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # what it raises depends on what differs
        raise SecretsError(
            f"{folder / CERTIFICATE} was not issued by {AUTHORITY}: the files are of two different clusters"
        ) from None
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = CLUSTER_NAME in names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        known = False
    if not known:
        raise SecretsError(f"{folder / CERTIFICATE} is not for {CLUSTER_NAME}; make it with `paceline certs`")
    return min(certificate.not_valid_after_utc, authority.not_valid_after_utc)


def _warn_if_readable(folder: Path) -> None:
    """Not refused: a container platform mounts secrets with modes of its own."""
    for name in (KEY, CURVE, SHARED):
        if (folder / name).stat().st_mode & 0o007:
            log.warning("%s can be read by every user of this host; `chmod 600` it", folder / name)
            return
