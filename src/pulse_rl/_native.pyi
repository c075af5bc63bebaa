import numpy as np
import numpy.typing as npt

class Malformed(ValueError): ...

def context_encode(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    width: int,
    shift: int,
    mask: int,
    floating: bool,
    runs: list[tuple[int, int, int]],
) -> tuple[bytes, int]: ...
def context_decode(
    payload: npt.NDArray[np.uint8],
    old: npt.NDArray[np.uint8],
    width: int,
    shift: int,
    mask: int,
    floating: bool,
    runs: list[tuple[int, int, int]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]: ...
def scan(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint32]: ...
def gather(
    elements: npt.NDArray[np.uint8], width: int, positions: npt.NDArray[np.uint32], base: int
) -> npt.NDArray[np.uint8]: ...
def scatter(
    elements: npt.NDArray[np.uint8],
    width: int,
    positions: npt.NDArray[np.uint32],
    base: int,
    values: npt.NDArray[np.uint8],
) -> None: ...
