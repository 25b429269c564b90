"""Tables from a finished run."""
