"""TRL's trainers with a real vLLM server, in vLLM's environment: make test-vllm."""
