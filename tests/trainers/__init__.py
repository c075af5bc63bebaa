"""Against the real trainers, in an environment of their own: make test-trainers."""
