"""The protocol's two sides, publisher and subscriber, over verified host states (docs/protocol.md,
sections 3 to 5)."""
