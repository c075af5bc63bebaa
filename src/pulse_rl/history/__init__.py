"""Patches that are coded by the changes of the versions before (docs/protocol.md, 12)."""
