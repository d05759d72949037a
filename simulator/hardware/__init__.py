"""Models and GPUs: the memory they need and have, and a profile moved to another card."""
