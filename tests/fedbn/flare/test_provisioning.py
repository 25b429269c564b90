"""Signed startup kits; a real provisioning and start is in tests/end_to_end/test_deployment.py."""

from __future__ import annotations

import pytest
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import ProvisionContext

from fedbn.flare.provisioning import SignedStartupBuilder


def test_without_a_root_key_the_builder_says_where_it_belongs(tmp_path):
    project = Project("fedbn", "", [])
    project.set_server("server.example.org", "lead", {})
    context = ProvisionContext(str(tmp_path), project)
    assert context.get(CtxKey.ROOT_PRI_KEY) is None
    with pytest.raises(RuntimeError, match="SignedStartupBuilder must come after CertBuilder"):
        SignedStartupBuilder().build(project, context)
