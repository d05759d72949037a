"""A discrete-event simulator of vLLM serving: it knows no network and no screen.

Where things are, from the ground up:

loads       lengths, arrivals, workload, sessions, trace; levels turns words into them, trace_files and load_files read
            and write them
results     run, run_files; summary, percentiles, resampling, steady_window, backlog
engine      request, engine_flags, engine_rules, kv_cache, waiting_queue, decode_batch, scheduler decide what a step
            does; step_time, cuda_graphs, rhythm say how long it takes; engine_core, simulation, clients, recorder play
            it in SimPy's time; fleet, routers play several; saturation tells what they hold
steps       step_log, explanation, chrome_trace
flags       vllm_flags, serve_flags, serve_line
profile     what calibration learned of a server; prediction and uncertainty play loads on it
hardware    model_config, quantization, kv_layout, memory, gpus, other_gpu
planning    alternative, unmodelled, what_if, paired_draws; targets, steady_state, replications, capacity, ceilings,
            limits, operating_point; optimize, search_space, search_log, workers
scenario    a file that says all of it; yaml_file reads such files, schema_version is what they all say of themselves
"""

__version__ = "0.1.0"
