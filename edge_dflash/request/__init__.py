"""How a request becomes a job on the engine, and its tokens an answer."""
