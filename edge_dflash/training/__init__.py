"""Training of drafters for an owner's target and prompts. Needs torch."""
