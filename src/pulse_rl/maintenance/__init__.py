"""What is done to a whole stream on any machine: verify, fold, delete what is not needed; audit a live model."""
