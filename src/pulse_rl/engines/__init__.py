"""What engines that follow a stream have in common: the map of their parameters, staging, the
scatter, the audit, the handle. Imports no engine; the integrations of vLLM and SGLang build on
it."""
