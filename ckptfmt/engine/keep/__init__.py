"""Recover, verify and collect what is on storage."""
