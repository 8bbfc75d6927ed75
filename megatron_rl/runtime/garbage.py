"""What Python's garbage collector looks at while a run goes on."""

import atexit
import gc


def spare_what_is_loaded() -> None:
    """Leave everything that exists now out of later collections: call it when a process has imported and built what it works with.

    That is 250,000 objects of torch, transformers and Ray. A full collection walks them for 0.15 s, and came in every second or third
    step; SGLang does the same in its own processes.
    """
    gc.collect()
    gc.freeze()
    # Triton's binding prints pages of "leaked" functions where the last collection, at the end of Python, does not see them.
    atexit.register(gc.unfreeze)
