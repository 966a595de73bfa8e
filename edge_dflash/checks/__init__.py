"""What a loaded pair is measured and judged by: bench, inspect, verify, doctor."""
