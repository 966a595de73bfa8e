"""Backends: everything that runs a Program."""
