"""What ``capsim calibrate`` answers: tables and sentences for people, rows and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capsim.tables import coefficient_table, console, fit_table
from simulator.profile import Profile


@dataclass(frozen=True)
class CalibrationAnswer:
    """A fitted profile and where it is. `doubts` are sentences on what contradicts itself, `remarks` on the fit."""

    profile: Profile
    path: Path
    raw_run: Path | None  # None where it was measured before
    doubts: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def content(self) -> dict[str, object]:
        profile = self.profile
        return {
            "profile": str(self.path),
            "raw_run": None if self.raw_run is None else str(self.raw_run),
            "coefficients": self.rows(),
            "fit": [level.model_dump() for level in profile.fit],
            "hold_out": [level.model_dump() for level in profile.hold_out],
            "noise": dict(profile.noise),
            "assumed": list(profile.assumed),
            "doubtful": list(self.doubts),
            "notes": list(self.remarks),
        }

    def rows(self) -> list[dict[str, object]]:
        """One for each coefficient, in seconds."""
        coefficients = self.profile.coefficients
        return [
            {
                "of": of,
                "coefficient": name,
                "value": term.value,
                "low_90": term.low,
                "high_90": term.high,
                "origin": term.origin,
            }
            for of, terms in (("step_time", coefficients.step_time), ("host_time", coefficients.host_time))
            for name, term in terms.items()
        ]

    def show(self) -> None:
        profile, screen = self.profile, console()
        screen.print(coefficient_table(profile))
        if profile.fit:
            screen.print(fit_table("Error on the levels that were fitted", profile.fit, profile.noise))
        if profile.hold_out:
            screen.print(fit_table("Error on the levels that were kept out", profile.hold_out, profile.noise))
        for sentence in profile.assumed:
            screen.print(f"Assumed: {sentence}", markup=False)
        for doubt in self.doubts:
            screen.print(f"Doubtful: {doubt}", markup=False)
        for remark in self.remarks:
            screen.print(remark, markup=False)
        screen.print(f"profile: {self.path}", markup=False, soft_wrap=True)
        if self.raw_run is not None:
            screen.print(f"raw run: {self.raw_run}", markup=False, soft_wrap=True)
