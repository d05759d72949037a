"""Looks up what is known against the packages of requirements-ci.lock. Fails for a vulnerability that has a fix.

Where the index does not tell, or cannot be reached, it says so and lets the build go on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[1] / "requirements-ci.lock"
SECONDS = 300


def main() -> int:
    options = ["--disable-pip", "--require-hashes", "--no-deps", "--progress-spinner", "off", "--timeout", "20"]
    command = [sys.executable, "-m", "pip_audit", *options, "-r", str(LOCK), "-f", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print(f"not audited: no answer in {SECONDS} s")
        return 0
    except (ValueError, KeyError):
        print(f"not audited: {(done.stderr.strip().splitlines() or ['pip-audit said nothing'])[-1]}")
        return 0
    return judged(found)


def judged(found: list[dict[str, Any]]) -> int:
    """Say what was found; 1 where an upgrade would mend something."""
    told = [package for package in found if "skip_reason" not in package]
    if not told:
        print(f"not audited: the index tells of none of {len(found)} packages what is known of it")
        return 0
    mendable = 0
    for package in told:
        for one in package["vulns"]:
            fixed = ", ".join(one["fix_versions"])
            mendable += bool(fixed)
            print(
                f"{package['name']} {package['version']}: {one['id']}, {f'fixed in {fixed}' if fixed else 'no fix yet'}"
            )
    print(f"{len(told)} of {len(found)} packages audited: {mendable} known vulnerabilities that an upgrade mends")
    return 1 if mendable else 0


if __name__ == "__main__":
    sys.exit(main())
