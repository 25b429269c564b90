"""What docs/site_settings.md shows is what works."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from nvflare.app_common.resource_consumers.gpu_resource_consumer import GPUResourceConsumer
from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager

from fedbn.federation.devices import find_device
from fedbn.federation.site_settings import SiteSettings, read_site_settings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "site_settings.md").read_text()


def blocks(language):
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found


def test_the_example_states_every_field(tmp_path):
    (example,) = blocks("yaml")
    (tmp_path / "fedbn_site.yml").write_text(example)
    settings = read_site_settings(tmp_path / "fedbn_site.yml")
    assert settings.model_fields_set == set(SiteSettings.model_fields)
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == list(SiteSettings.model_fields)


@pytest.mark.parametrize("path", sorted((ROOT / "sites").glob("*/fedbn_site.yml")), ids=str)
def test_the_sites_of_this_repository_have_settings_that_can_be_used(path):
    settings = read_site_settings(path)
    assert settings.site == path.parent.name
    assert settings.share_affine is False


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Stand in for a machine's nvidia-smi."""

    def make(n_gpus):
        script = tmp_path / "nvidia-smi"
        rows = {"index": range(n_gpus), "memory": ["81920 MiB"] * n_gpus}
        script.write_text(
            "#!/bin/sh\ncase $1 in\n"
            + "".join(
                f"*{name}*) echo {name}; {'; '.join(f'echo {row}' for row in lines) or ':'};;\n"
                for name, lines in rows.items()
            )
            + "esac\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")

    return make


@pytest.mark.parametrize(("visible", "physical"), [("0", 0), ("2", 2), ("3,1", 3)])
def test_flare_gives_a_job_the_device_that_the_client_was_started_with(
    machine, monkeypatch, visible, physical
):
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    component, meta = (json.loads(block) for block in blocks("json"))
    assert component["path"].endswith(f".{GPUResourceManager.__name__}")
    manager = GPUResourceManager(**component["args"])
    asked = meta["resource_spec"]["NYU"]
    assert manager._check_required_resource_available(asked)
    GPUResourceConsumer().consume(manager._reserve_resource(asked))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(physical)
    choice = find_device("auto", site="NYU", count=lambda: 1)
    assert (choice.device, choice.physical) == ("cuda:0", physical)


def test_a_client_with_more_gpus_than_there_are_does_not_start(machine, monkeypatch):
    machine(0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    component, _ = (json.loads(block) for block in blocks("json"))
    with pytest.raises(ValueError, match="exceeds available GPUs: 0"):
        GPUResourceManager(**component["args"])
