"""How large a load may be. Beyond these bounds are typing errors and files that lie, not loads that anyone sends."""

from __future__ import annotations

MOST_REQUESTS = 10_000_000  # of a level, and clients; a simulation of as many takes some ten minutes and 10 GB
MOST_TOKENS = 10_000_000  # of a prompt, an answer or a system prompt; models with a longer context are not known
MOST_SECONDS = 1e9  # of a load or a pause in it, about 30 years
LEAST_RATE, MOST_RATE = 1e-6, 1e9  # requests a second; one in 12 days
LEAST_BURSTINESS = 0.05  # below it gaps of zero and of years take turns
MOST_WEIGHT = 1e9  # of one kind of request beside others
MOST_FACTOR, LEAST_FACTOR = 1e6, 1e-6  # of a rate curve, 0 aside
