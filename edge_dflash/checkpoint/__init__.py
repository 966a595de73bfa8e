"""Model and drafter checkpoints: reading, validation, specs. No torch."""
