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
    from calibration.fit import fit_profile
    from calibration.validate import validate
    from capsim.figures.notebook import picture
    from capsim.shipped import find_profile, find_scenario
    from simulator.alternative import Alternative, alternative
    from simulator.ceilings import ceilings
    from simulator.engine import simulate_level
    from simulator.engine_flags import EngineFlags
    from simulator.explanation import explain
    from simulator.operating_point import recommend, slo_table
    from simulator.optimize import Optimizer
    from simulator.prediction import predict
    from simulator.profile import Profile
    from simulator.run import Level, Run
    from simulator.run_files import load_run, save_run
    from simulator.scenario import Scenario
    from simulator.search_space import configurations
    from simulator.serve_line import read_line
    from simulator.step_log import observe_level
    from simulator.step_time import HostTime, StepTime
    from simulator.summary import summarize, summary_table
    from simulator.what_if import what_if
    from simulator.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "ClosedLoop",
    "EngineFlags",
    "HostTime",
    "Length",
    "Level",
    "OpenLoop",
    "Optimizer",
    "Profile",
    "Run",
    "Scenario",
    "Shape",
    "StepTime",
    "Workload",
    "__version__",
    "alternative",
    "ceilings",
    "configurations",
    "explain",
    "find_profile",
    "find_scenario",
    "fit_profile",
    "load_run",
    "observe_level",
    "picture",
    "predict",
    "read_line",
    "recommend",
    "save_run",
    "simulate_level",
    "slo_table",
    "summarize",
    "summary_table",
    "validate",
    "what_if",
]

# Imported when first asked for: `import capsim`, and so `capsim --help`, loads none of them.
_HOMES = {
    "simulator.alternative": ("Alternative", "alternative"),
    "simulator.ceilings": ("ceilings",),
    "simulator.engine": ("simulate_level",),
    "simulator.engine_flags": ("EngineFlags",),
    "simulator.explanation": ("explain",),
    "simulator.operating_point": ("recommend", "slo_table"),
    "simulator.optimize": ("Optimizer",),
    "simulator.prediction": ("predict",),
    "simulator.profile": ("Profile",),
    "simulator.run": ("Level", "Run"),
    "simulator.run_files": ("load_run", "save_run"),
    "simulator.scenario": ("Scenario",),
    "simulator.search_space": ("configurations",),
    "simulator.serve_line": ("read_line",),
    "simulator.step_log": ("observe_level",),
    "simulator.step_time": ("HostTime", "StepTime"),
    "simulator.summary": ("summarize", "summary_table"),
    "simulator.what_if": ("what_if",),
    "simulator.workload": ("ClosedLoop", "Length", "OpenLoop", "Shape", "Workload"),
    "calibration.fit": ("fit_profile",),
    "calibration.validate": ("validate",),
    "capsim.figures.notebook": ("picture",),
    "capsim.shipped": ("find_profile", "find_scenario"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
