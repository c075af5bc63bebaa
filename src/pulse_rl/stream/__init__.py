"""What lies in a store and what leads where: names, manifests, signatures, anchors, links (docs/format.md, 4 to 6)."""
