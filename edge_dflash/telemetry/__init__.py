"""What the board says of itself while it works: power, clocks, temperatures, throttling, memory. Nothing is changed."""
