"""What engines that follow a stream have in common: the map of their parameters, staging, the scatter, the audit, the
handle. Imports no engine; `pulse_rl.integrations.vllm` builds on it."""
