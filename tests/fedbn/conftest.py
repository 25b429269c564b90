"""A hospital's startup kit as `nvflare provision` makes it, with keys that are quick to make."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    serialize_cert,
    serialize_pri_key,
    sign_folders,
)

PRIVACY = Path(__file__).parents[2] / "sites" / "hospital" / "privacy.json"


class Project:
    """A project's root key, and what it makes for its participants."""

    def __init__(self, name="project"):
        self.identity = Identity(name, "lead", None)
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        year = {"not_valid_before": now() - timedelta(days=2), "valid_days": 3650}
        self.certificate = serialize_cert(
            generate_cert(
                self.identity, self.identity, self.key, self.key.public_key(), ca=True, **year
            )
        )

    def write_certificate(self, folder, role, name, start=-2, days=365, **more):
        """Write `role`.crt and .key for a participant; valid from `start` days from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        begin = now() + timedelta(days=start)
        certificate = generate_cert(
            Identity(name, "org", None),
            self.identity,
            self.key,
            key.public_key(),
            not_valid_before=begin,
            not_valid_after=begin + timedelta(days=days),
            **more,
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{role}.crt").write_bytes(serialize_cert(certificate))
        file = folder / f"{role}.key"
        file.write_bytes(serialize_pri_key(key))
        file.chmod(0o600)
        (folder / "rootCA.pem").write_bytes(self.certificate)

    def write_kit(
        self,
        folder,
        client="NYU",
        target="localhost:1",
        scheme="grpc",
        security="mtls",
        signed=True,
        privacy=True,
        **certificate,
    ):
        startup, local = folder / "startup", folder / "local"
        local.mkdir(parents=True)
        self.write_certificate(startup, "client", client, **certificate)
        config = {
            "format_version": 2,
            "servers": [
                {
                    "name": "project",
                    "service": {"target": target, "scheme": scheme},
                    "identity": "server",
                }
            ],
            "client": {
                "ssl_private_key": "client.key",
                "ssl_cert": "client.crt",
                "ssl_root_cert": "rootCA.pem",
                "fqsn": client,
                "is_leaf": True,
                "connection_security": security,
            },
        }
        (startup / "fed_client.json").write_text(json.dumps(config, indent=2))
        (startup / "start.sh").write_text("#!/usr/bin/env bash\n")
        if signed:  # as fedbn's SignedStartupBuilder does
            sign_folders(str(startup), self.key, signature_file="signature.json")
        if privacy:
            shutil.copy(PRIVACY, local / "privacy.json")
        return folder


def now():
    return datetime.now(timezone.utc).replace(microsecond=0)


@pytest.fixture(scope="session")
def project():
    return Project()


@pytest.fixture(scope="session")
def other_project():
    return Project("other")


@pytest.fixture
def make_kit(project, tmp_path):
    def make(name="kit", **arguments):
        return project.write_kit(tmp_path / name, **arguments)

    return make
