"""For tests: which versions of a kernel this processor has, and which one is used."""

from . import _kernels

__all__ = ["sha256_paths", "use_rans_vectors", "use_vectors"]

sha256_paths = _kernels.sha256_paths
use_rans_vectors = _kernels.use_rans_vectors
use_vectors = _kernels.use_vectors
