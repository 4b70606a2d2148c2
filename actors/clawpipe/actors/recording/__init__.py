"""Demonstrations recorded through real harnesses: blank errands, run once each, and filled in many times."""
