"""One worker that owns the engine: its queue, its requests, their answers."""
