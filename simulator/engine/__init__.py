"""vLLM's engine, step for step: what a step does, how long it takes, and the clients and fleets that keep it busy."""
