"""A profile's server started with the flags of a command line, and what is assumed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capsim.terminal import echo
from simulator.flags.serve_line import ServeLine
from simulator.planning.alternative import BASELINE, Alternative, alternative
from simulator.profile import Profile


def started(
    profile: Profile, flags: Mapping[str, Any], gpu: str | None = None, tensor_parallel_size: int | None = None
) -> Alternative:
    """The server with `flags` such as ``--max-num-seqs``; as measured without any. Says on stderr what is assumed.

    Raises what `simulator.planning.alternative.alternative` raises.
    """
    if tensor_parallel_size is not None and tensor_parallel_size > 1:
        flags = {**flags, "--tensor-parallel-size": str(tensor_parallel_size)}
    if not flags and gpu is None:
        return Alternative(BASELINE, profile)
    server = alternative(profile, ServeLine.of(flags, gpu))
    for sentence in (*(f"assumed: {text}" for text in server.assumed), *server.notes):
        echo(f"Note: {sentence}", err=True)
    return server
