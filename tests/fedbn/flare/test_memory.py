"""Memory does not grow from round to round; `benchmarks/memory.py` looks at real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_hundred_rounds_of_a_learner_and_the_server_need_no_more_memory():
    script = Path(__file__).with_name("hundred_rounds.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", script]
    # A selection in the environment would be this test, which would start itself without end.
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parents[3], env=own)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
