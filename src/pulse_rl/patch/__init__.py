"""One patch: cut a state into blocks, build, parse, apply, undo (docs/format.md, section 3). Pure functions."""
