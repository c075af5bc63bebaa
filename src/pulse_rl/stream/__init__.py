"""A stream's objects in a store and the links between them: names, manifests, signatures, anchors
(docs/format.md, 4 to 6)."""
