"""Tests against the real vLLM, in an environment of their own: `make test-vllm`."""
