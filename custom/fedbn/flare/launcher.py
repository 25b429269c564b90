"""What starts a job's process at a site: a process that was killed is started again.

FLARE by itself reports a job's process that ends by a signal (a full memory, an operator's mistake)
to the server, which then ends the whole job within seconds, however many sites its quorum needs.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

_MEANT = (-signal.SIGTERM, -signal.SIGINT)


class RestartingJobLauncher(ClientProcessJobLauncher):
    """Start a job's process at a site, and start it again if a signal kills it.

    It belongs into a site's own ``local/resources.json``, in place of FLARE's
    ``ClientProcessJobLauncher``. The new process asks for its task, FLARE sends the one whose
    answer is missing again, and the site goes on from its batch norm on the disk. Whatever a
    process says with an exit code of its own, and every end that FLARE or an operator asks for
    (``kill`` without ``-9``), is left as it is.

    A process that is killed more often than `restarts` times is not started again; the site then
    counts as gone, and the job goes on without it if its ``min_clients`` allow.

    Parameters
    ----------
    restarts
        How often a job's process is started again.
    pause_seconds
        How long to wait before that, so that the server has noticed the end of the connection.
    """

    def __init__(self, restarts: int = 3, pause_seconds: float = 1.0):
        super().__init__()
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            raise ValueError(f"restarts must be a whole number of at least 0, got {restarts!r}")
        self.restarts = restarts
        self.pause_seconds = pause_seconds

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Start the process."""

        def start() -> ProcessHandle:
            return super(RestartingJobLauncher, self).launch_job(job_meta, fl_ctx)

        return RestartingHandle(start, self.restarts, self.pause_seconds, self.logger)


class RestartingHandle(JobHandleSpec):
    """A job's process and those that take its place.

    Parameters
    ----------
    start
        Starts the process; called once at once.
    restarts, pause_seconds
        See :class:`RestartingJobLauncher`.
    logger
        Says when a process is started again, and when it is not any more.
    """

    def __init__(
        self,
        start: Callable[[], ProcessHandle],
        restarts: int,
        pause_seconds: float,
        logger: logging.Logger,
    ):
        self._start = start
        self._left = restarts
        self._pause_seconds = pause_seconds
        self._logger = logger
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process = start()

    def wait(self) -> None:
        """Wait for the end of the process, and of all that take its place."""
        while True:
            self._process.wait()
            code = self._process.adapter.poll()
            if not self._was_killed() or self._ended.is_set():
                return
            if not self._left:
                self._logger.error(f"the job's process was killed (signal {-code}) once too often")
                return
            self._left -= 1
            self._logger.warning(
                f"the job's process was killed (signal {-code}); it is started again, "
                f"{self._left} more times at most"
            )
            self._ended.wait(self._pause_seconds)
            with self._lock:
                if self._ended.is_set():
                    return
                self._process = self._start()

    def poll(self) -> Any:
        """Return FLARE's code of how it ended; for a killed process, that nobody knows.

        An unknown end is none that FLARE ends the whole job for.
        """
        if self._was_killed() and not self._ended.is_set():
            return JobReturnCode.UNKNOWN
        return self._process.poll()

    def terminate(self) -> None:
        """End the process, for good."""
        with self._lock:
            self._ended.set()
            self._process.terminate()

    def _was_killed(self) -> bool:
        code = self._process.adapter.poll()
        return code is not None and code < 0 and code not in _MEANT
