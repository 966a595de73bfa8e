"""The speculative loop and its rules."""
