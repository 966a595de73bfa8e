"""What a loaded pair reaches here: times, bytes and memory, against the read bandwidth measured in the same run."""
