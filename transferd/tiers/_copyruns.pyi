import numpy as np
import numpy.typing as npt

def copy_runs(source_address: int, target_address: int, runs: npt.NDArray[np.int64], /) -> None: ...
