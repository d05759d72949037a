"""Predictions against real GPUs that others measured: fit a few rows of a source, predict its others."""
