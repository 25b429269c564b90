"""The one rule for the name of a site, from the first command to the last."""

import re

__all__ = ["LONGEST_SITE_NAME", "SITE_NAME", "check_site_name"]

#: It names folders, FLARE clients and columns of tables.
SITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
LONGEST_SITE_NAME = 63


def check_site_name(name: str) -> None:
    """Refuse a name that a site cannot have.

    Raises
    ------
    ValueError
    """
    if not re.fullmatch(SITE_NAME, name) or len(name) > LONGEST_SITE_NAME:
        raise ValueError(
            f"site is {name!r}; use letters, digits, '-' and '_', a letter or digit first, at most "
            f"{LONGEST_SITE_NAME} characters"
        )
