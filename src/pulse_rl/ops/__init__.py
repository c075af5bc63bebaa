"""What operators do with whole streams: verify, collect garbage, relay, fold, check out, attest."""
