"""Checks of outputs: speculative against plain, and against golden files."""
