"""Limits on the work of Python's garbage collector during a run."""

import atexit
import gc


def spare_what_is_loaded() -> None:
    """Exclude all existing objects from later collections; call after all imports and construction.

    Torch, transformers and Ray have 250,000 objects. A full collection walks all of them in 0.15 s,
    in every second or third step; SGLang does the same in its own processes.
    """
    gc.collect()
    gc.freeze()
    # Triton's binding prints pages of "leaked" functions when the last collection, at the end of
    # Python, skips them.
    atexit.register(gc.unfreeze)
