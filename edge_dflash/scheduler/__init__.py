"""One engine, many callers: a fair queue, one worker thread, tickets. Knows nothing of what it runs."""
