"""Bridges to frameworks, each imported by the program that uses it; nothing in pulse_rl imports
them."""
