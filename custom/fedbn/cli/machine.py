"""``doctor``: whether a machine is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn.cli.common import app, one_sentence


@app.command()
def doctor(
    site_config: Annotated[
        Path | None,
        typer.Option(help="The site's fedbn_site.yml. Default: local/fedbn_site.yml of the kit."),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option(
            help="The site's startup kit: the folder that holds startup/ and local/. Default: this "
            "folder, if it is one.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job folder, to find out whether it can train here.")
    ] = None,
) -> None:
    """Look whether this machine is ready for a federation, before a client is started."""
    with one_sentence():
        from fedbn.flare.doctor import FAILED, examine

        if kit is None and (Path.cwd() / "startup" / "fed_client.json").is_file():
            kit = Path.cwd()
        statuses = []
        for finding in examine(kit, site_config, job):
            typer.echo(f"{finding.status:<8} {finding.subject}: {finding.sentence}")
            statuses.append(finding.status)
        if kit is None:
            typer.echo("no startup kit was looked at: give --kit FOLDER")
        if n_failed := statuses.count(FAILED):
            raise ValueError(
                f"{n_failed} of {len(statuses)} lines failed: do what they say, and run it again"
            )
