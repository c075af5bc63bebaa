"""Trainers and tensor libraries: each module imports its framework."""
