"""The page in a real browser: it complains of nothing, and asks nobody for anything."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own calls home fail, too
    "--enable-logging=stderr",
    "--hide-scrollbars",
)
OWN = "not an origin"  # what the browser asks for by itself

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (apt-get install chromium)"),
]


def look_at(page, folder, width):
    """Return the console's lines and what the page asked the network for."""
    folder.mkdir()
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={folder / 'net.json'}",
            f"--window-size={width},900",
            f"--screenshot={folder / 'page.png'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (folder / "page.png").is_file(), done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads((folder / "net.json").read_text())["events"]
    started = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return console, [params["url"] for params in started if params["initiator"] != OWN]


def test_the_check_sees_what_a_bad_page_does(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><img src="http://192.0.2.1/x.png"><script>console.error("bad")</script>'
    )
    console, asked = look_at(page, tmp_path / "seen", 800)
    assert any('"bad"' in line for line in console)
    assert asked == ["http://192.0.2.1/x.png"]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", ["compared_page", "run_page"])
def test_no_error_in_the_console_and_no_request(request, tmp_path, kind, width):
    console, asked = look_at(request.getfixturevalue(kind), tmp_path / "seen", width)
    assert console == []
    assert asked == []
