"""The table of flags against a real vLLM: every flag of its `serve` command is in it, and takes as many values."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from simulator.flags.serve_flags import serve_flags

VALUES = {None: "one", "+": "some", "*": "some", "?": "maybe", 0: "none"}

# where the parser is made: since 0.30, and before
DUMP = """
import json
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print("flags:" + json.dumps([[action.option_strings, action.nargs] for action in actions]))
"""


def test_every_flag_of_vllm_serve_is_judged(venv: Path) -> None:
    done = subprocess.run([venv / "bin" / "python", "-c", DUMP], capture_output=True, text=True, check=False)
    assert "flags:" in done.stdout, done.stderr[-2000:]
    known, checked = serve_flags(), 0
    for names, values in json.loads(done.stdout.rpartition("flags:")[2]):
        for name in names:
            if name not in ("-h", "--help") and not name.startswith("--no-"):
                assert name in known, f"{name} is not in data/vllm_flags.yaml"
                assert known[name].values == VALUES[values], name
                checked += 1
    assert checked > 150
