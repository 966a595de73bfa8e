"""Checkpoints to a bundle: streaming, resumable, atomic. Needs torch."""
