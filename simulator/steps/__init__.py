"""Where the time of a run went, engine step by engine step."""
