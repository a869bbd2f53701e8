"""Freeze a state, write it, and take it through C1 to C5."""
