"""Figures, drawn by matplotlib without a screen."""
