"""A discrete-event simulator of vLLM serving: it knows no network and no screen.

Where things are, from the ground up:

Loads       lengths, arrivals, workload, sessions, trace; levels and scenario turn words into them, trace_files and
            load_files read and write them
Engine      request, engine_flags, engine_rules, kv_cache, waiting_queue, decode_batch, scheduler decide what a step
            does; step_time, cuda_graphs say how long it takes; engine_core, engine, clients play both in SimPy's time
Results     recorder, run, run_files; summary, percentiles, resampling, steady_window; step_log, explanation,
            chrome_trace for where the time goes
Prediction  profile, prediction, uncertainty
Hardware    model_config, quantization, kv_layout, memory, gpus, other_gpu
Flags       vllm_flags, serve_flags, serve_line, unmodelled, alternative
Planning    targets, steady_state, replications, capacity, ceilings, limits, operating_point; what_if, paired_draws;
            fleet, routers; optimize, search_space, search_log, workers
"""
