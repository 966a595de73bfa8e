"""What a loaded pair is judged by: inspect, verify, doctor; and the arithmetic of its bytes."""
