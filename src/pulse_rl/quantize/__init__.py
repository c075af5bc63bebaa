"""States of codes and scales, as the checkpoints of FP8 and FP4 models have them."""
