"""The demo pair: its weights, robot tasks with right answers, plans checked by simulation."""
