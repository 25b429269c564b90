"""Nothing but a name: FLARE builds classes of an installed package only if a job brings code.

Without any file in ``app/custom`` a job may name FLARE's own classes alone. What this job runs is
the installed package ``fedbn``.
"""
