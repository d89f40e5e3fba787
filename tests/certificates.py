"""Certificates for tests, made anew by trustme: a CA, a server's and a client's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Files with certificates of one CA; ``client`` and ``server`` hold the certificate, its chain and the key."""

    authority: trustme.CA
    ca: Path
    server: Path
    server_key: Path
    client: Path


def make_certificates(folder: Path, *, client_names: tuple[str, ...] = ("prometheus.example.org",)) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    server = authority.issue_cert("localhost", "127.0.0.1")
    client = authority.issue_cert(*client_names)
    made = Certificates(
        authority, folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "client.pem"
    )
    authority.cert_pem.write_to_path(str(made.ca))
    made.server.write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    server.private_key_pem.write_to_path(str(made.server_key))
    client.private_key_and_cert_chain_pem.write_to_path(str(made.client))
    return made
