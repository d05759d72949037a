"""The twin: a server that answers as vLLM does and takes the time that the simulator says.

The scheduler, step times and host times are the simulator's own, driven by a clock (`live_engine`); the rest is HTTP
(`server`). It computes nothing: its words are always the same ones.
"""
