"""capsim predicts latency and throughput of an LLM server.

It measures a live vLLM endpoint, fits how long the engine's steps take, and replays the engine's scheduling in
simulated time.

    >>> import capsim
    >>> profile = capsim.Profile.load("profile.yaml")
    >>> shape = capsim.Shape(capsim.Length.fixed(1024), capsim.Length.fixed(256))
    >>> run = capsim.predict(profile, [capsim.Workload(capsim.ClosedLoop(16), (shape,), num_prompts=1000)])
    >>> capsim.summary_table(run)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibration.validate import validate
    from simulator.engine import simulate_level
    from simulator.engine_flags import EngineFlags
    from simulator.prediction import predict
    from simulator.profile import Profile
    from simulator.run import Level, Run
    from simulator.run_files import load_run, save_run
    from simulator.scenario import Scenario
    from simulator.step_time import HostTime, StepTime
    from simulator.summary import summarize, summary_table
    from simulator.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

__version__ = "0.1.0"

__all__ = [
    "ClosedLoop",
    "EngineFlags",
    "HostTime",
    "Length",
    "Level",
    "OpenLoop",
    "Profile",
    "Run",
    "Scenario",
    "Shape",
    "StepTime",
    "Workload",
    "__version__",
    "load_run",
    "predict",
    "save_run",
    "simulate_level",
    "summarize",
    "summary_table",
    "validate",
]

# Imported when first asked for: `import capsim`, and so `capsim --help`, loads none of them.
_HOMES = {
    "simulator.engine": ("simulate_level",),
    "simulator.engine_flags": ("EngineFlags",),
    "simulator.prediction": ("predict",),
    "simulator.profile": ("Profile",),
    "simulator.run": ("Level", "Run"),
    "simulator.run_files": ("load_run", "save_run"),
    "simulator.scenario": ("Scenario",),
    "simulator.step_time": ("HostTime", "StepTime"),
    "simulator.summary": ("summarize", "summary_table"),
    "simulator.workload": ("ClosedLoop", "Length", "OpenLoop", "Shape", "Workload"),
    "calibration.validate": ("validate",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
