"""A discrete-event simulator of vLLM serving: it knows no network and no screen."""
