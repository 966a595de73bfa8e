"""The demo pair: robot tasks with their right answers, a check of plans by simulation, and the weights."""
