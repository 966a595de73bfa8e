"""What every room uses: bounded reading, strict tables, rules for values, processes, progress."""
