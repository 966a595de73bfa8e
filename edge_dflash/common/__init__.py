"""What every part may use: bounded reading, strict tables, rules for values, other processes, progress."""
