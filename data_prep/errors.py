"""What is wrong with a hospital's data, in one sentence that says where and what to do."""

from collections.abc import Sequence

__all__ = ["SourceError", "StoreError", "TooSmallError", "some_of"]


class SourceError(ValueError):
    """The subjects' data cannot be used as they are."""


class StoreError(ValueError):
    """A site store, or what should become one, is not usable.

    Parameters
    ----------
    sentence : str
        What is wrong, where, and what to do.
    public : str, optional
        The same without what is of one subject, for a message that leaves the site.
    """

    def __init__(self, sentence: str, public: str | None = None):
        super().__init__(sentence)
        self.public = public or sentence


class TooSmallError(StoreError):
    """A site has too few subjects for what is asked."""


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """List the first few of many names, for a sentence."""
    if not names:
        return "none"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
