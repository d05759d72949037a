"""Many independent simulations at once: on all cores through joblib, or on a Dask or Ray cluster by its name.

The same tasks give the same results whoever computes them, and in whatever order.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import joblib

BACKENDS = ("loky", "dask", "ray")
AT_A_TIME = 32  # tasks that a cluster gets before the next ones; what is done by then can be kept

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkersError(ValueError):
    """Workers that cannot be had. The message is one line."""


@dataclass(frozen=True)
class Workers:
    """Who computes.

    Attributes
        backend: "loky" for processes on this machine, "dask" or "ray" for a cluster
        jobs: processes on this machine; all cores for -1, none beside this one for 1
        scheduler_address: of the cluster, such as ``tcp://10.0.0.1:8786``; a Dask or Ray of this machine without
    """

    backend: str = "loky"
    jobs: int = -1
    scheduler_address: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise WorkersError(f"no backend is called {self.backend!r}; there are {', '.join(BACKENDS)}")
        if self.jobs == 0 or self.jobs < -1:
            raise WorkersError(f"the number of jobs is at least 1, or -1 for all cores; got {self.jobs}")
        if self.backend == "loky" and self.scheduler_address is not None:
            raise WorkersError("a scheduler's address goes with the backend dask or ray")
        module = {"dask": "distributed", "ray": "ray"}.get(self.backend)
        if module and importlib.util.find_spec(module) is None:
            raise WorkersError(f"the backend {self.backend} is not installed; pip install 'capsim[{self.backend}]'")

    def run(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """The number of each task and what `function` makes of it, as they are done."""
        if not tasks:
            return
        if self.backend == "loky":
            yield from self._on_this_machine(function, tasks)
            return
        with self._cluster(), joblib.parallel_config(self.backend, n_jobs=-1):
            for start in range(0, len(tasks), AT_A_TIME):
                part = tasks[start : start + AT_A_TIME]
                results = joblib.Parallel()(joblib.delayed(function)(task) for task in part)
                yield from enumerate(results, start)

    def _on_this_machine(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        if self.jobs == 1:
            yield from ((number, function(task)) for number, task in enumerate(tasks))
            return
        parallel = joblib.Parallel(n_jobs=self.jobs, backend="loky", return_as="generator_unordered")
        yield from parallel(joblib.delayed(_numbered)(function, number, task) for number, task in enumerate(tasks))

    def _cluster(self) -> AbstractContextManager[Any]:
        """The connection to a cluster, for as long as it is needed."""
        if self.backend == "dask":
            distributed: Any = importlib.import_module("distributed")
            try:
                client: AbstractContextManager[Any] = distributed.Client(self.scheduler_address, timeout="10s")
            except OSError:
                raise WorkersError(f"no Dask scheduler answers at {self.scheduler_address}") from None
            return client
        if self.backend == "ray":
            return _ray(self.scheduler_address)
        return nullcontext()


def _numbered(function: Callable[[Task], Result], number: int, task: Task) -> tuple[int, Result]:
    return number, function(task)


def _ray(address: str | None) -> ExitStack:
    ray: Any = importlib.import_module("ray")
    importlib.import_module("ray.util.joblib").register_ray()
    connected = ExitStack()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
        connected.callback(ray.shutdown)
    return connected
