"""How a place reads its data: decided by each site, never by a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Cache = Literal["memory", "disk", "none"]
Amp = Literal["off", "bf16"]


@dataclass(frozen=True)
class Loading:
    """Where prepared images are kept, who prepares them, and how precisely a network computes.

    Attributes
    ----------
    cache
        Of images after preprocessing: ``"memory"``, ``"disk"`` (in `folder`) or ``"none"``.
    workers
        Processes that augment images ahead of the training; 0: the training itself does. The bits
        are the same with any number.
    amp
        ``"bf16"``: the network's layers compute in bfloat16 where PyTorch holds that safe.
    folder
        The site's own, for what is kept on disk.
    """

    cache: Cache = "memory"
    workers: int = 0
    amp: Amp = "off"
    folder: Path | None = None
