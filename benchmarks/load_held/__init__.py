"""What capsim holds out: long sweeps, many levels, clients that vanish, long traces, large simulations.

    python -m benchmarks.load_held.sweep --minutes 10            256 streams on the twin
    python -m benchmarks.load_held.sweep --levels 200 --level-seconds 2
    python -m benchmarks.load_held.vanish --rounds 20            clients that are killed in the middle of a stream
    python -m benchmarks.load_held.traces --lines 1000000        reading and playing a long trace
    python -m benchmarks.load_held.growth                        cost of a request in loads that grow

Memory, descriptors and processes are read from /proc, so these need Linux. A million simulated requests are
`python -m benchmarks.speed --million`.
"""
