"""Number formats of weights, KV and activations; recipes that choose them; calibration of scales. Build time: torch."""
