"""What a worker may want beyond one whole stream in memory: many streams, parts, folders."""
