"""Tests against a real vLLM on this machine's CPU; install_vllm.sh installs it, server.py starts it."""
