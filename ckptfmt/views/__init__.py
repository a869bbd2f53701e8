"""Committed generations as other tools see them."""
