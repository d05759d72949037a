"""The flags of vllm serve, and the command lines that carry them."""
