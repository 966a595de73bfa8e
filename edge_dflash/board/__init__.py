"""The machine: architectures, profiles of boards, and what a board says of itself while it works."""
