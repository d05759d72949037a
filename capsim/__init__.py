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

from simulator import __version__

if TYPE_CHECKING:
    from calibration.fit import fit_profile
    from calibration.validate import validate
    from capsim.figures.notebook import picture
    from capsim.shipped import find_profile, find_scenario
    from simulator.engine.engine_flags import EngineFlags
    from simulator.engine.simulation import simulate_level
    from simulator.engine.step_time import HostTime, StepTime
    from simulator.flags.serve_line import read_line
    from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
    from simulator.planning.alternative import Alternative, alternative
    from simulator.planning.ceilings import ceilings
    from simulator.planning.operating_point import recommend, slo_table
    from simulator.planning.optimize import Optimizer
    from simulator.planning.search_space import configurations
    from simulator.planning.what_if import what_if
    from simulator.prediction import predict
    from simulator.profile import Profile
    from simulator.results.run import Level, Run
    from simulator.results.run_files import load_run, save_run
    from simulator.results.summary import summarize, summary_table
    from simulator.scenario import Scenario
    from simulator.steps.explanation import explain
    from simulator.steps.step_log import observe_level

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
    "simulator.planning.alternative": ("Alternative", "alternative"),
    "simulator.planning.ceilings": ("ceilings",),
    "simulator.engine.simulation": ("simulate_level",),
    "simulator.engine.engine_flags": ("EngineFlags",),
    "simulator.steps.explanation": ("explain",),
    "simulator.planning.operating_point": ("recommend", "slo_table"),
    "simulator.planning.optimize": ("Optimizer",),
    "simulator.prediction": ("predict",),
    "simulator.profile": ("Profile",),
    "simulator.results.run": ("Level", "Run"),
    "simulator.results.run_files": ("load_run", "save_run"),
    "simulator.scenario": ("Scenario",),
    "simulator.planning.search_space": ("configurations",),
    "simulator.flags.serve_line": ("read_line",),
    "simulator.steps.step_log": ("observe_level",),
    "simulator.engine.step_time": ("HostTime", "StepTime"),
    "simulator.results.summary": ("summarize", "summary_table"),
    "simulator.planning.what_if": ("what_if",),
    "simulator.loads.workload": ("ClosedLoop", "Length", "OpenLoop", "Shape", "Workload"),
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
