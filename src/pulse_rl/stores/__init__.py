"""Backends of `pulse_rl.store` beyond a folder: object stores, HTTP, the Hugging Face Hub."""
