"""What of a line that starts a server has no effect here, and what has one that is not modelled."""

from __future__ import annotations

from simulator.engine.engine_flags import FlagError
from simulator.flags.serve_line import ServeLine
from simulator.profile import Profile

# variables of vLLM that change neither decisions nor durations
_HARMLESS = {
    "VLLM_API_KEY",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_ASSETS_CACHE",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_CONFIGURE_LOGGING",
    "VLLM_DO_NOT_TRACK",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_PREFIX",
    "VLLM_NO_USAGE_STATS",
    "VLLM_PORT",
    "VLLM_RPC_TIMEOUT",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_MODELSCOPE",
    "VLLM_WORKER_MULTIPROC_METHOD",
}


class AlternativeError(FlagError):
    """An alternative that cannot be simulated from this profile. The message is one line."""


def judged(profile: Profile, line: ServeLine) -> list[str]:
    """Notes on what has no effect. Raises `AlternativeError` for what has one that is not modelled."""
    remedy = "calibrate a server that runs with it; leave it out if the measured one does"
    for flag, value in line.flags.items():
        if flag.refuses(value):
            shown = f"--{'no-' if value is False else ''}{flag.name}"
            raise AlternativeError(f"{shown} would change the result and is not modelled ({flag.topic}): {remedy}")
    for name in line.environment:
        if (
            name.startswith("VLLM_")
            and name not in _HARMLESS
            and (name, line.environment[name]) != ("VLLM_USE_V1", "1")
        ):
            raise AlternativeError(f"{name} may change the result and is not modelled: {remedy}")
    without = [f"--{flag.name}" for flag in line.flags if flag.kind == "no_effect" and flag.name != "model"]
    as_usual = [f"--{flag.name} {value}" for flag, value in line.flags.items() if flag.kind == "not_modelled"]
    notes = [f"without effect on the result: {', '.join(without)}"] if without else []
    notes += [f"taken to be as on the measured server: {', '.join(as_usual)}"] if as_usual else []
    if line.before:
        notes.append(f"left out of account: {line.before}")
    if line.model is not None:
        notes += _other_model(profile.model, line.model)
    return notes


def _other_model(measured: str, named: str) -> list[str]:
    """Refuses another model; a path on a disk is taken to be the measured one, with a note if its name differs."""
    if _base(measured) == _base(named):
        return []
    if named.startswith(("/", ".", "~")):
        return [f"{named} is taken to be {measured}"]
    raise AlternativeError(
        f"the profile is of {measured}, and the line serves {named}: calibrate a server of that model"
    )


def _base(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
