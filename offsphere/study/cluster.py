"""The Ray engine (extra `cluster`): the same plan, each run a task.

`RAY_ADDRESS` names the cluster; without it Ray is started on this machine. Every node must see the
folder the study was started in under the same path: there lie the results, and with them the
checkpoint from which a lost worker's or node's run resumes elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offsphere.study.execution import Ended, perform
from offsphere.study.plan import Run

SECONDS_TO_ANSWER = 10.0
SECONDS_TO_START = 300.0
"""A loaded machine needs minutes to start Ray."""


class RayEngine:
    """Runs as Ray tasks of one CPU each; the study's own retry is the only one."""

    def __init__(self, workers: int | None, gpus: float = 0.0) -> None:
        try:
            import ray
            import ray.exceptions
        except ImportError:
            raise ValueError("--engine=ray needs the extra: pip install -e '.[cluster]'.") from None
        _refuse_unreachable(os.environ.get("RAY_ADDRESS", ""))
        self.ray = ray
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        cpus = None if os.environ.get("RAY_ADDRESS") else workers or os.cpu_count()
        try:
            with _patience():
                ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
        except Exception as error:  # Ray raises many kinds, bare ones too
            raise ValueError(f"Ray could not be started or reached: {error}") from error
        for number, handler in before.items():  # Ray's own would end the study at once
            signal.signal(number, handler)
        self.slots = workers or int(ray.cluster_resources().get("CPU", 1))
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(perform_in)
        self.folder = str(Path.cwd())
        self.running: dict[Any, Run] = {}

    def start(self, run: Run) -> None:
        """Submit a run."""
        self.running[self.task.remote(run, self.folder)] = run

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, also by the loss of their worker or node."""
        done, _ = self.ray.wait(list(self.running), timeout=seconds)
        return [Ended(self.running.pop(task), self._reason(task)) for task in done]

    def stop(self) -> None:
        """Interrupt the tasks: training loops then write their checkpoints."""
        for task in self.running:
            self.ray.cancel(task)

    def close(self) -> None:
        """Leave the cluster."""
        self.ray.shutdown()

    def _reason(self, task: Any) -> str | None:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            return f"its worker was lost ({type(error).__name__}: {first})"


def _refuse_unreachable(address: str) -> None:
    """Ray would wait for minutes for a cluster that nobody answers for."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # none, or `auto` and `local`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"No Ray cluster answers at RAY_ADDRESS={address} within {SECONDS_TO_ANSWER:.0f} "
            f"seconds ({error}): start one there, or unset it to run on this machine."
        ) from None


@contextmanager
def _patience() -> Iterator[None]:
    """End the process if Ray hangs where no exception reaches it: nothing has started yet."""

    def give_up() -> None:
        print(
            f"offsphere study: error: Ray was not ready within {SECONDS_TO_START:.0f} seconds "
            f"(RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}): is that a Ray cluster?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    watch = threading.Timer(SECONDS_TO_START, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def perform_in(run: Run, folder: str) -> str | None:
    """Do a run in the study's folder, which this node must share."""
    if not Path(folder).is_dir():
        return f"{folder} is not on the node {os.uname().nodename}: the nodes must share it"
    os.chdir(folder)
    return perform(run)
