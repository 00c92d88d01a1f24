"""Certificates of one local cluster: its own authority, one serving certificate, one client certificate per identity.

Nothing here is shared between clusters, so a credential of one is refused by the other. Every private key is written
with mode 0600. Clients verify the server; there is no ``insecure-skip-tls-verify`` anywhere.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=365)


@dataclass(frozen=True)
class KeyPair:
    """PEM files of a certificate and its private key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that exists only while it issues: its private key is never written to disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        # Different from every issued name: equal subject and issuer read as self-signed.
        self._name = _name("rlfleet-local-cluster-authority")
        self._certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, common_name: str, organization: str | None = None, addresses: tuple[str, ...] = ()
    ) -> KeyPair:
        """Issues a certificate that serves under ``addresses`` (IPs and DNS names) and identifies a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if addresses:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(_name(common_name, organization), self._name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if addresses:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(a) for a in addresses]), critical=False
            )
        pair = KeyPair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_private(pair.key, _private_pem(key))
        return pair


def service_account_keys(folder: Path) -> KeyPair:
    """The key pair that signs and verifies service account tokens (here a bare public key, not a certificate)."""
    key = ec.generate_private_key(ec.SECP256R1())
    pair = KeyPair(folder / "service-account.pub", folder / "service-account.key")
    pair.certificate.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    write_private(pair.key, _private_pem(key))
    return pair


def write_kubeconfig(
    path: Path,
    server: str,
    authority: Path,
    *,
    pair: KeyPair | None = None,
    token: str | None = None,
    namespace: str = "default",
) -> None:
    """Writes a self-contained kubeconfig (certificates embedded, mode 0600) for a client certificate or a token."""
    user: dict[str, str] = {}
    if pair is not None:
        user["client-certificate-data"] = _embedded(pair.certificate)
        user["client-key-data"] = _embedded(pair.key)
    if token is not None:
        user["token"] = token
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "rlfleet", "cluster": {"server": server, "certificate-authority-data": _embedded(authority)}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "rlfleet", "context": {"cluster": "rlfleet", "user": "user", "namespace": namespace}}],
        "current-context": "rlfleet",
    }
    write_private(path, yaml.safe_dump(config, sort_keys=False).encode())


def write_private(path: Path, data: bytes) -> None:
    """Replaces ``path`` atomically; nobody but its owner can read it at any moment."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as output:
        output.write(data)
    os.replace(temporary, path)


def _embedded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    # SEC1 ("EC PRIVATE KEY"): the form that kube-apiserver and kube-controller-manager read for token signing.
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _name(common_name: str, organization: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization is not None:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
