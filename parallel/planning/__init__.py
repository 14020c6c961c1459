"""Planning a run without running it: memory, bytes sent and time of each mesh of ranks."""
