"""What measures a loaded pair by the clock: plans, cycles, prompts, memory, lanes. Only the command line imports it."""
