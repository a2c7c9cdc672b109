"""The local engine: long-lived worker processes, so that imports and data are paid for once each.

Workers are forked from one warm process that has imported what every training script needs. They
end with the study, also when it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from offsphere.run.scripts import Script
from offsphere.study.execution import Ended, perform
from offsphere.study.plan import Run
from offsphere.training.settings import TrainSettings

THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(eq=False)
class Worker:
    process: BaseProcess
    connection: Connection
    run: Run | None = None


class LocalEngine:
    """Runs side by side on this machine, one per worker process, one thread each."""

    def __init__(self, workers: int, scripts: Iterable[Script]) -> None:
        self.slots = workers
        self.workers: list[Worker] = []
        for name in THREAD_SETTINGS:
            os.environ.setdefault(name, "1")
        self.context = multiprocessing.get_context("forkserver")
        trains = any(issubclass(script.config_class, TrainSettings) for script in scripts)
        self.context.set_forkserver_preload(["offsphere.training.run"] if trains else [])

    def start(self, run: Run) -> None:
        """Hand a run to an idle worker, or to a new one."""
        idle = (w for w in self.workers if w.run is None and w.process.is_alive())
        worker = next(idle, None) or self._new_worker()
        worker.run = run
        with suppress(BrokenPipeError):  # it died while idle: `wait` will say so
            worker.connection.send(run)

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, also by the death of their worker."""
        sources = [s for w in self.workers for s in (w.connection, w.process.sentinel)]
        ready = wait(sources, seconds)
        ended = []
        for worker in tuple(self.workers):
            if worker.connection in ready or worker.process.sentinel in ready:
                reason = self._reason(worker)
                if worker.run is not None:
                    ended.append(Ended(worker.run, reason))
                worker.run = None
        return ended

    def stop(self) -> None:
        """Send SIGTERM to the workers at work: training loops then write their checkpoints."""
        for worker in self.workers:
            if worker.run is not None and worker.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            worker.process.join(5)
            worker.process.kill()
            worker.process.join()
        self.workers = []

    def _new_worker(self) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        worker = Worker(process, ours)
        self.workers.append(worker)
        return worker

    def _reason(self, worker: Worker) -> str | None:
        """What a worker answered; a dead one is let go."""
        try:
            return worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.connection.close()
            self.workers.remove(worker)
            return _death(worker.process.exitcode)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{hint}"
    return f"its process ended with exit code {code}"


def _serve(connection: Connection) -> None:
    """A worker: run after run, until the study closes the connection or dies."""
    os.setsid()  # so that a terminal's Ctrl-C reaches the study alone, which passes on one signal
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    with suppress(EOFError):
        while True:
            connection.send(perform(connection.recv()))


def _end_with_the_study() -> None:
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os._exit(1)
