"""Publishing from several ranks: who publishes what (docs/protocol.md, 10)."""
